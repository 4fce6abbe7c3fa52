#include "text/added_tokens.h"

#include <algorithm>

#include "text/utf8.h"

namespace sortie::text {
namespace {

char32_t last_character(std::string_view text) {
  size_t at = text.size() - 1;
  while (at > 0 && (static_cast<uint8_t>(text[at]) & 0xC0) == 0x80) --at;
  return utf8_step(text.substr(at)).code;
}

// \w, but for what Unicode's tables would say about characters past ASCII: letters are taken for
// granted there, since single_word tokens are ASCII in practice.
bool is_word(char32_t c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
         (c >= 0xAA && !is_space(c) && !(c >= 0x2000 && c <= 0x206F) &&
          !(c >= 0x3000 && c <= 0x303F));
}

bool touches_word(std::string_view before, std::string_view after) {
  return (!before.empty() && is_word(last_character(before))) ||
         (!after.empty() && is_word(utf8_step(after).code));
}

}  // namespace

void AddedTokens::Trie::add(std::string_view content, int32_t token) {
  begins[static_cast<uint8_t>(content[0])] = true;
  uint64_t node = 0;
  for (const char c : content) {
    const auto [it, added] = children.try_emplace(node << 8 | static_cast<uint8_t>(c),
                                                  static_cast<uint32_t>(ends.size()));
    if (added) ends.push_back(-1);
    node = it->second;
  }
  ends[node] = token;
}

int32_t AddedTokens::Trie::match(std::string_view text) const {
  int32_t best = -1;
  uint64_t node = 0;
  for (const char c : text) {
    const auto it = children.find(node << 8 | static_cast<uint8_t>(c));
    if (it == children.end()) break;
    node = it->second;
    if (ends[node] >= 0) best = ends[node];
  }
  return best;
}

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)), tries_(2) {
  for (size_t i = 0; i < tokens_.size(); ++i) {
    tries_[tokens_[i].normalized ? 1 : 0].add(tokens_[i].content, static_cast<int32_t>(i));
  }
}

void AddedTokens::split_by(const Trie& trie, std::string_view text,
                           std::vector<Span>& spans) const {
  size_t done = 0;
  size_t at = 0;
  while (at < text.size()) {
    if (!trie.begins[static_cast<uint8_t>(text[at])]) {
      ++at;
      continue;
    }
    const int32_t found = trie.match(text.substr(at));
    if (found < 0) {
      ++at;
      continue;
    }
    const AddedToken& token = tokens_[static_cast<size_t>(found)];
    size_t begin = at;
    size_t end = at + token.content.size();
    at = end;
    if (token.single_word && touches_word(text.substr(0, begin), text.substr(end))) continue;
    if (token.lstrip) {
      while (begin > done && is_space(last_character(text.substr(done, begin - done)))) {
        do {
          --begin;
        } while (begin > done && (static_cast<uint8_t>(text[begin]) & 0xC0) == 0x80);
      }
    }
    if (token.rstrip) {
      while (end < text.size() && is_space(utf8_step(text.substr(end)).code)) {
        end += utf8_step(text.substr(end)).length;
      }
    }
    if (done < begin) spans.push_back({text.substr(done, begin - done), -1});
    spans.push_back({text.substr(begin, end - begin), token.id});
    done = end;
    at = std::max(at, end);
  }
  if (done < text.size()) spans.push_back({text.substr(done), -1});
}

void AddedTokens::split(std::string_view text, std::vector<Span>& spans) const {
  std::vector<Span> first;
  split_by(tries_[0], text, first);
  spans.clear();
  for (const Span& span : first) {
    if (span.id >= 0) {
      spans.push_back(span);
    } else {
      split_by(tries_[1], span.text, spans);
    }
  }
}

}  // namespace sortie::text
