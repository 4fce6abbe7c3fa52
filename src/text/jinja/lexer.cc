#include "text/jinja/lexer.h"

#include <fmt/format.h>

#include <algorithm>

#include "text/jinja/value.h"
#include "text/utf8.h"

namespace sortie::text::jinja {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_name_start(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
         static_cast<uint8_t>(c) >= 0x80;
}
bool is_blank(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

// str.rstrip() and \s of Python: White_Space and the four separators U+001C to U+001F.
size_t leading_space(std::string_view text) {
  size_t n = 0;
  while (n < text.size()) {
    const Utf8Step step = utf8_step(text.substr(n));
    if (!is_space(step.code) && !(step.code >= 0x1C && step.code <= 0x1F)) break;
    n += step.length;
  }
  return n;
}

void strip_end(std::string& text) {
  while (!text.empty()) {
    size_t at = text.size() - 1;
    while (at > 0 && (static_cast<uint8_t>(text[at]) & 0xC0) == 0x80) --at;
    if (leading_space(std::string_view(text).substr(at)) != text.size() - at) return;
    text.resize(at);
  }
}

// Line breaks become \n, and one at the very end goes.
std::string normalise(std::string_view source) {
  std::string out;
  out.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r') {
      out += '\n';
      if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
    } else {
      out += source[i];
    }
  }
  if (!out.empty() && out.back() == '\n') out.pop_back();
  return out;
}

class Lexer {
 public:
  explicit Lexer(std::string source) : source_(std::move(source)) {}

  std::vector<Token> run() {
    while (at_ < source_.size()) {
      size_t tag = source_.find('{', at_);
      while (tag != std::string::npos && !begins_tag(tag)) tag = source_.find('{', tag + 1);
      if (tag == std::string::npos) {
        emit(TokenKind::kText, source_.substr(at_));
        advance(source_.size());
        break;
      }
      const char kind = source_[tag + 1];
      const char sign = tag + 2 < source_.size() ? source_[tag + 2] : '\0';
      text_before(tag, kind != '{', sign);
      advance(tag + 2 + (sign == '-' || sign == '+' ? 1 : 0));
      line_starting_ = false;
      if (kind == '#') {
        comment();
      } else if (kind == '{') {
        emit(TokenKind::kOutputBegin, "{{");
        expression("}}", TokenKind::kOutputEnd);
      } else if (!raw()) {
        emit(TokenKind::kBlockBegin, "{%");
        expression("%}", TokenKind::kBlockEnd);
      }
    }
    emit(TokenKind::kEnd, "");
    return std::move(tokens_);
  }

 private:
  bool begins_tag(size_t at) const {
    return at + 1 < source_.size() &&
           (source_[at + 1] == '{' || source_[at + 1] == '%' || source_[at + 1] == '#');
  }

  void emit(TokenKind kind, std::string text) {
    if (kind == TokenKind::kText && text.empty()) return;
    tokens_.push_back({kind, std::move(text), line_});
  }

  void advance(size_t to) {
    line_ += static_cast<int>(std::count(source_.begin() + static_cast<std::ptrdiff_t>(at_),
                                         source_.begin() + static_cast<std::ptrdiff_t>(to), '\n'));
    at_ = to;
  }

  // The text up to a tag at `tag`, without what the tag's sign or lstrip_blocks takes away.
  void text_before(size_t tag, bool lstrip, char sign) {
    std::string text = source_.substr(at_, tag - at_);
    if (sign == '-') {
      strip_end(text);
    } else if (sign != '+' && lstrip) {
      const size_t line_break = text.rfind('\n');
      const size_t line = line_break == std::string::npos ? 0 : line_break + 1;
      const bool at_line = line_break != std::string::npos || line_starting_;
      if (at_line && leading_space(std::string_view(text).substr(line)) == text.size() - line) {
        text.resize(line);
      }
    }
    emit(TokenKind::kText, std::move(text));
  }

  // After a closing delimiter that ends at `end`; `sign` stood before it.
  void close(size_t end, char sign, bool trim) {
    size_t to = end;
    if (sign == '-') {
      to += leading_space(std::string_view(source_).substr(end));
    } else if (sign != '+' && trim && end < source_.size() && source_[end] == '\n') {
      ++to;
    }
    line_starting_ = to > 0 && source_[to - 1] == '\n';
    advance(to);
  }

  void comment() {
    const size_t end = source_.find("#}", at_);
    if (end == std::string::npos) fail("a comment is not closed", line_);
    const char sign = end > at_ ? source_[end - 1] : '\0';
    close(end + 2, sign, true);
  }

  // {% raw %} … {% endraw %}; at_ stands behind "{%" and its sign.
  bool raw() {
    size_t p = skip_blank(at_);
    if (source_.compare(p, 3, "raw") != 0) return false;
    p = skip_blank(p + 3);
    const char sign = p < source_.size() && source_[p] == '-' ? '-' : '\0';
    if (sign == '-') ++p;
    if (source_.compare(p, 2, "%}") != 0) return false;
    close(p + 2, sign, false);
    for (size_t tag = source_.find("{%", at_); tag != std::string::npos;
         tag = source_.find("{%", tag + 2)) {
      size_t q = tag + 2;
      const char open = q < source_.size() ? source_[q] : '\0';
      if (open == '-' || open == '+') ++q;
      q = skip_blank(q);
      if (source_.compare(q, 6, "endraw") != 0) continue;
      q = skip_blank(q + 6);
      const char shut = q < source_.size() ? source_[q] : '\0';
      if (shut == '-' || shut == '+') ++q;
      if (source_.compare(q, 2, "%}") != 0) continue;
      text_before(tag, true, open);
      close(q + 2, shut, true);
      return true;
    }
    fail("a raw block is not closed", line_);
  }

  size_t skip_blank(size_t p) const {
    while (p < source_.size() && is_blank(source_[p])) ++p;
    return std::min(p, source_.size());
  }

  void expression(std::string_view close_mark, TokenKind end_kind) {
    const int begin_line = line_;
    int brackets = 0;
    while (at_ < source_.size()) {
      advance(skip_blank(at_));
      if (at_ >= source_.size()) break;
      if (brackets == 0) {  // within brackets }} may close two dicts
        const char sign = source_[at_];
        const bool signed_end =
            (sign == '-' || (sign == '+' && end_kind == TokenKind::kBlockEnd)) &&
            source_.compare(at_ + 1, 2, close_mark) == 0;
        if (signed_end || source_.compare(at_, 2, close_mark) == 0) {
          emit(end_kind, std::string(close_mark));
          close(at_ + (signed_end ? 3 : 2), signed_end ? sign : '\0',
                end_kind == TokenKind::kBlockEnd);
          return;
        }
      }
      token(brackets);
    }
    fail(fmt::format("a tag is not closed with {}", close_mark), begin_line);
  }

  void token(int& brackets) {
    const char c = source_[at_];
    if (is_name_start(c)) {
      size_t end = at_;
      while (end < source_.size() && (is_name_start(source_[end]) || is_digit(source_[end]))) ++end;
      emit(TokenKind::kName, source_.substr(at_, end - at_));
      advance(end);
    } else if (is_digit(c)) {
      number();
    } else if (c == '"' || c == '\'') {
      string(c);
    } else {
      static constexpr std::string_view kPairs[] = {"==", "!=", "<=", ">=", "//", "**"};
      static constexpr std::string_view kSingles = "+-*/%~<>=()[]{}|.,:";
      const std::string_view two = std::string_view(source_).substr(at_, 2);
      const bool pair = std::find(std::begin(kPairs), std::end(kPairs), two) != std::end(kPairs);
      if (!pair && kSingles.find(c) == std::string_view::npos) {
        fail(fmt::format("unexpected character '{}'", valid_utf8(std::string_view(&c, 1))), line_);
      }
      if (c == '(' || c == '[' || c == '{') ++brackets;
      if ((c == ')' || c == ']' || c == '}') && brackets > 0) --brackets;
      emit(TokenKind::kOperator, std::string(pair ? two : two.substr(0, 1)));
      advance(at_ + (pair ? 2 : 1));
    }
  }

  void number() {
    size_t end = at_;
    const auto digits = [&] {
      while (end < source_.size() && (is_digit(source_[end]) || source_[end] == '_')) ++end;
    };
    digits();
    bool real = false;
    if (end + 1 < source_.size() && source_[end] == '.' && is_digit(source_[end + 1])) {
      real = true;
      ++end;
      digits();
    }
    if (end < source_.size() && (source_[end] == 'e' || source_[end] == 'E')) {
      size_t p = end + 1;
      if (p < source_.size() && (source_[p] == '+' || source_[p] == '-')) ++p;
      if (p < source_.size() && is_digit(source_[p])) {
        real = true;
        end = p;
        digits();
      }
    }
    std::string text = source_.substr(at_, end - at_);
    std::erase(text, '_');
    emit(real ? TokenKind::kFloat : TokenKind::kInteger, std::move(text));
    advance(end);
  }

  void string(char mark) {
    size_t p = at_ + 1;
    std::string out;
    while (p < source_.size() && source_[p] != mark) {
      if (source_[p] == '\\' && p + 1 < source_.size()) {
        p = escape(p + 1, out);
      } else {
        out += source_[p++];
      }
    }
    if (p >= source_.size()) fail("a string is not closed", line_);
    emit(TokenKind::kString, std::move(out));
    advance(p + 1);
  }

  // Python's escapes; `p` stands behind the backslash. An unknown one keeps its backslash.
  size_t escape(size_t p, std::string& out) const {
    static constexpr std::string_view kNames = "ntrbfav\\'\"";
    static constexpr std::string_view kValues = "\n\t\r\b\f\a\v\\'\"";
    const char c = source_[p];
    if (c == '\n') return p + 1;
    if (const size_t i = kNames.find(c); i != std::string_view::npos) {
      out += kValues[i];
      return p + 1;
    }
    const size_t most = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    const bool octal = c >= '0' && c <= '7';
    if (most == 0 && !octal) {
      out += '\\';
      return p;
    }
    const size_t begin = octal ? p : p + 1;
    const size_t end = std::min(begin + (octal ? 3 : most), source_.size());
    uint32_t code = 0;
    size_t q = begin;
    for (; q < end; ++q) {
      const char d = source_[q];
      const int digit = is_digit(d)            ? d - '0'
                        : d >= 'a' && d <= 'f' ? d - 'a' + 10
                        : d >= 'A' && d <= 'F' ? d - 'A' + 10
                                               : 99;
      if (digit >= (octal ? 8 : 16)) break;
      code = code * (octal ? 8 : 16) + static_cast<uint32_t>(digit);
    }
    if (!octal && q - begin != most) fail("a \\x, \\u or \\U escape is cut short", line_);
    append_utf8(out, code);
    return q;
  }

  const std::string source_;
  size_t at_ = 0;
  int line_ = 1;
  bool line_starting_ = true;  // what was read last ended with a line break
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> lex(std::string_view source) { return Lexer(normalise(source)).run(); }

}  // namespace sortie::text::jinja
