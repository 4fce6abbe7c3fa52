#include "text/tokenizer.h"

#include "text/detokeniser.h"
#include "text/utf8.h"

namespace sortie::text {
namespace {

// Longer words hardly come twice.
constexpr size_t kLongestCachedWord = 64;

}  // namespace

Result<std::vector<int32_t>> Tokenizer::encode(std::string_view text, bool add_special) const {
  std::string repaired;
  if (!is_valid_utf8(text)) {
    repaired = valid_utf8(text);
    text = repaired;
  }
  std::vector<int32_t> ids;
  if (!add_special) {
    RETURN_IF_ERROR(encode_text(text, ids));
    return ids;
  }
  for (const int32_t id : template_) {
    if (id == kText) {
      RETURN_IF_ERROR(encode_text(text, ids));
    } else {
      ids.push_back(id);
    }
  }
  return ids;
}

Status Tokenizer::encode_text(std::string_view text, std::vector<int32_t>& ids) const {
  std::vector<AddedTokens::Span> spans;
  added_.split(text, spans);
  std::vector<std::string_view> words;
  Bpe::Scratch scratch;
  // Where in `ids` a word's ids stand already. A cache of this call alone: no lock, no growth.
  struct Range {
    size_t begin;
    size_t count;
  };
  std::unordered_map<std::string_view, Range> seen;
  for (const auto& span : spans) {
    if (span.id >= 0) {
      ids.push_back(span.id);
      continue;
    }
    RETURN_IF_ERROR(pre_tokenizer_.split(span.text, words));
    for (const std::string_view word : words) {
      const bool cached = word.size() <= kLongestCachedWord;
      if (cached) {
        if (const auto it = seen.find(word); it != seen.end()) {
          const auto [begin, count] = it->second;
          for (size_t i = 0; i < count; ++i) ids.push_back(ids[begin + i]);
          continue;
        }
      }
      const size_t begin = ids.size();
      const auto whole = ignore_merges_ ? id_.find(word) : id_.end();
      if (whole != id_.end()) {
        ids.push_back(whole->second);
      } else {
        bpe_.encode(word, scratch, ids);
      }
      if (cached) seen.emplace(word, Range{begin, ids.size() - begin});
    }
  }
  return {};
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool skip_special) const {
  Detokeniser detokeniser(*this, skip_special);
  std::string text;
  for (const int32_t id : ids) text += detokeniser.push(id);
  return text + detokeniser.finish();
}

std::string_view Tokenizer::token_bytes(int32_t id) const {
  if (id < 0 || id >= vocab_size()) return {};
  return tokens_[static_cast<size_t>(id)].bytes;
}

bool Tokenizer::is_special(int32_t id) const {
  return id >= 0 && id < vocab_size() && tokens_[static_cast<size_t>(id)].special;
}

std::optional<int32_t> Tokenizer::id_of(std::string_view content) const {
  const auto it = id_.find(content);
  if (it == id_.end()) return std::nullopt;
  return it->second;
}

}  // namespace sortie::text
