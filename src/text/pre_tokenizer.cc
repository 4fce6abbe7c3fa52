#include "text/pre_tokenizer.h"

#include <fmt/format.h>

#include <optional>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

namespace sortie::text {
namespace {

constexpr size_t kMaxStages = 64;
constexpr size_t kMaxPattern = size_t{64} << 10;
// Backtracking steps from one starting place. A run of n spaces takes at most n of them; a pattern
// that explodes gives an error at once.
constexpr uint32_t kMatchLimit = 10'000'000;
constexpr uint32_t kHeapLimitKiB = 256 * 1024;

// GPT-2's pattern, which a ByteLevel stage applies itself when use_regex is set (Radford et al.,
// 2019, encoder.py).
constexpr const char* kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// tokenizer.json's patterns are written for Oniguruma. What differs in PCRE2 is put right here:
// \s is Unicode's White_Space there, but takes U+180E too in PCRE2. Class intersections and nested
// classes mean something else in PCRE2, so they are refused rather than misread.
Result<std::string> to_pcre2(const std::string& pattern) {
  static constexpr std::string_view kSpace =
      R"(\x09-\x0d\x20\x85\xa0\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";
  // Within a run of spaces that does not reach the end, \s+$ would fail from each of its n places
  // after n steps; if it fails from the first, it fails from all.
  if (pattern == R"(\s+$)") return fmt::format("(?<![{0}])[{0}]+$", kSpace);
  std::string out;
  bool in_class = false;
  size_t class_begin = 0;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '\\' && i + 1 < pattern.size()) {
      const char next = pattern[++i];
      if (next == 's') {
        out += in_class ? std::string(kSpace) : fmt::format("[{}]", kSpace);
      } else if (next == 'S' && !in_class) {
        out += fmt::format("[^{}]", kSpace);
      } else {
        out += c;
        out += next;
      }
      continue;
    }
    if (in_class) {
      const bool first = i == class_begin || (i == class_begin + 1 && pattern[class_begin] == '^');
      if (c == ']' && !first) {
        in_class = false;
      } else if (c == '&' && pattern.compare(i, 2, "&&") == 0) {
        return Status::invalid(
            fmt::format("the pattern \"{}\" intersects character classes (&&), which is not "
                        "supported",
                        pattern));
      } else if (c == '[' && pattern.compare(i, 2, "[:") != 0) {
        return Status::invalid(fmt::format(
            "the pattern \"{}\" nests character classes, which is not supported", pattern));
      } else if (c == '[') {  // [:alpha:]
        const size_t end = pattern.find(":]", i);
        if (end != std::string::npos) {
          out.append(pattern, i, end + 2 - i);
          i = end + 1;
          continue;
        }
      }
    } else if (c == '[') {
      in_class = true;
      class_begin = i + 1;
    }
    out += c;
  }
  return out;
}

std::string pcre2_message(int code) {
  std::string buffer(256, '\0');
  const int n =
      pcre2_get_error_message(code, reinterpret_cast<PCRE2_UCHAR*>(buffer.data()), buffer.size());
  buffer.resize(n > 0 ? static_cast<size_t>(n) : 0);
  return buffer;
}

bool flag(const nlohmann::json& object, const char* key, bool otherwise) {
  const auto it = object.find(key);
  return it != object.end() && it->is_boolean() ? it->get<bool>() : otherwise;
}

std::string type_of(const nlohmann::json& object) {
  if (!object.is_object()) return "(not an object)";
  const auto it = object.find("type");
  return it != object.end() && it->is_string() ? it->get<std::string>() : "(no type)";
}

}  // namespace

void PreTokenizer::FreeCode::operator()(pcre2_real_code_8* code) const { pcre2_code_free(code); }

Result<PreTokenizer> PreTokenizer::make(const nlohmann::json& config) {
  PreTokenizer result;
  bool byte_level = false;
  RETURN_IF_ERROR(result.add(config, byte_level));
  if (!byte_level) {
    return Status::invalid(
        "pre_tokenizer: there is no ByteLevel stage, and only byte-level BPE is supported");
  }
  return result;
}

Status PreTokenizer::add(const nlohmann::json& config, bool& byte_level) {
  const std::string type = type_of(config);
  if (byte_level) {
    return Status::invalid(fmt::format("pre_tokenizer: {} after ByteLevel is not supported", type));
  }
  if (type == "Sequence") {
    const auto list = config.find("pretokenizers");
    if (list == config.end() || !list->is_array()) {
      return Status::invalid("pre_tokenizer: Sequence has no list of pretokenizers");
    }
    for (const auto& stage : *list) RETURN_IF_ERROR(add(stage, byte_level));
    return {};
  }
  if (type == "Split") return add_split(config);
  if (type == "Digits") {
    return add_stage(flag(config, "individual_digits", false) ? R"(\p{N})" : R"(\p{N}+)", false,
                     false, false);
  }
  if (type == "ByteLevel") {
    byte_level = true;
    if (flag(config, "add_prefix_space", true)) {
      return Status::invalid("pre_tokenizer: ByteLevel with add_prefix_space is not supported");
    }
    if (flag(config, "use_regex", true)) return add_stage(kGpt2Pattern, false, false, false);
    return {};
  }
  return Status::invalid(fmt::format("pre_tokenizer: the type {} is not supported", type));
}

Status PreTokenizer::add_split(const nlohmann::json& config) {
  const auto behavior = config.find("behavior");
  const std::string how = behavior != config.end() && behavior->is_string()
                              ? behavior->get<std::string>()
                              : std::string("(none)");
  if (how != "Isolated" && how != "Removed") {
    return Status::invalid(
        fmt::format("pre_tokenizer: Split with the behavior {} is not supported", how));
  }
  const auto pattern = config.find("pattern");
  if (pattern != config.end() && pattern->is_object()) {
    for (const bool literal : {false, true}) {
      const auto text = pattern->find(literal ? "String" : "Regex");
      if (text == pattern->end() || !text->is_string()) continue;
      return add_stage(text->get<std::string>(), literal, flag(config, "invert", false),
                       how == "Removed");
    }
  }
  return Status::invalid("pre_tokenizer: Split has neither a Regex nor a String pattern");
}

Status PreTokenizer::add_stage(const std::string& pattern, bool literal, bool invert, bool remove) {
  if (stages_.size() >= kMaxStages || pattern.size() > kMaxPattern) {
    return Status::invalid("pre_tokenizer: there are too many stages or a pattern is too long");
  }
  std::string translated = pattern;
  if (!literal) {
    ASSIGN_OR_RETURN(translated, to_pcre2(pattern));
  }
  int error = 0;
  PCRE2_SIZE where = 0;
  // Ruby's syntax, which Oniguruma defaults to, lets ^ and $ match at every line break.
  const uint32_t options = PCRE2_UTF | (literal ? PCRE2_LITERAL : PCRE2_UCP | PCRE2_MULTILINE);
  std::unique_ptr<pcre2_compile_context, decltype(&pcre2_compile_context_free)> context(
      pcre2_compile_context_create(nullptr), &pcre2_compile_context_free);
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  pcre2_set_parens_nest_limit(context.get(), 100);
  Stage stage;
  stage.code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                                 options, &error, &where, context.get()));
  if (stage.code == nullptr) {
    return Status::invalid(fmt::format("pre_tokenizer: the pattern \"{}\" does not compile: {}",
                                       pattern, pcre2_message(error)));
  }
  pcre2_jit_compile(stage.code.get(), PCRE2_JIT_COMPLETE);  // without it matching is only slower
  stage.pattern = pattern;
  stage.invert = invert;
  stage.remove = remove;
  stages_.push_back(std::move(stage));
  return {};
}

// What matching needs beside the patterns; one for each split(), so that a tokenizer may be used
// from many threads.
class PreTokenizer::Matcher {
 public:
  Matcher()
      : data_(pcre2_match_data_create(1, nullptr), &pcre2_match_data_free),
        context_(pcre2_match_context_create(nullptr), &pcre2_match_context_free),
        stack_(pcre2_jit_stack_create(size_t{32} << 10, size_t{4} << 20, nullptr),
               &pcre2_jit_stack_free) {
    pcre2_set_match_limit(context_.get(), kMatchLimit);
    pcre2_set_heap_limit(context_.get(), kHeapLimitKiB);
    pcre2_jit_stack_assign(context_.get(), nullptr, stack_.get());
  }

  struct Range {
    size_t begin;
    size_t end;
  };

  // The first match at or after `from`; nothing, or an error code.
  int find(const Stage& stage, std::string_view text, size_t from, Range& range) {
    int rc = match(stage, text, from, PCRE2_NO_UTF_CHECK);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT) {
      rc = match(stage, text, from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT);
    }
    if (rc < 0) return rc;
    const PCRE2_SIZE* ends = pcre2_get_ovector_pointer(data_.get());
    range = {ends[0], ends[1]};
    return 0;
  }

 private:
  int match(const Stage& stage, std::string_view text, size_t from, uint32_t options) {
    return pcre2_match(stage.code.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                       from, options, data_.get(), context_.get());
  }

  std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> data_;
  std::unique_ptr<pcre2_match_context, decltype(&pcre2_match_context_free)> context_;
  std::unique_ptr<pcre2_jit_stack, decltype(&pcre2_jit_stack_free)> stack_;
};

Status PreTokenizer::split(std::string_view text, std::vector<std::string_view>& pieces) const {
  pieces.clear();
  if (text.empty()) return {};
  pieces.push_back(text);
  if (stages_.empty()) return {};
  Matcher matcher;
  std::vector<std::string_view> next;
  for (const Stage& stage : stages_) {
    next.clear();
    for (const std::string_view piece : pieces) {
      size_t done = 0;  // everything before it is in `next`
      size_t from = 0;
      const auto emit = [&](size_t begin, size_t end, bool matched) {
        if (begin < end && !(stage.remove && matched != stage.invert)) {
          next.push_back(piece.substr(begin, end - begin));
        }
      };
      while (from < piece.size()) {
        Matcher::Range range{};
        const int rc = matcher.find(stage, piece, from, range);
        if (rc == PCRE2_ERROR_NOMATCH) break;
        // \K and look-behind could report a range that begins before the last one's end.
        if (rc < 0 || range.begin < done || range.end < range.begin) {
          return Status::invalid(
              fmt::format("The tokenizer's pattern \"{}\" cannot be applied to this text: {}.",
                          stage.pattern, rc < 0 ? pcre2_message(rc) : "it moves backwards"));
        }
        emit(done, range.begin, false);
        emit(range.begin, range.end, true);
        done = range.end;
        from = range.end;
        if (range.begin == range.end) {  // an empty match only cuts
          do {
            ++from;
          } while (from < piece.size() && (static_cast<uint8_t>(piece[from]) & 0xC0) == 0x80);
        }
      }
      emit(done, piece.size(), false);
    }
    pieces.swap(next);
  }
  return {};
}

}  // namespace sortie::text
