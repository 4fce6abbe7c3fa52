#include "text/jinja/strings.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "text/jinja/python.h"
#include "text/utf8.h"

namespace sortie::text::jinja {
namespace {

constexpr size_t kLongestMark = 256;

char up(char c) { return c >= 'a' && c <= 'z' ? static_cast<char>(c - 32) : c; }
char down(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; }
bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || static_cast<uint8_t>(c) >= 0x80;
}
bool is_python_space(char32_t c) { return is_space(c) || (c >= 0x1C && c <= 0x1F); }

// Byte range of the last character.
size_t last_begin(std::string_view text) {
  size_t at = text.size() - 1;
  while (at > 0 && (static_cast<uint8_t>(text[at]) & 0xC0) == 0x80) --at;
  return at;
}

void check_count(const std::vector<Value>& items, const Budget& budget) {
  if (items.size() > budget.max_items) fail("a list is too long");
}

std::vector<Value> split_space(std::string_view text, int64_t limit, const Budget& budget) {
  std::vector<Value> parts;
  for (;;) {
    const std::string rest = strip(text, Value(), true, false);
    text = text.substr(text.size() - rest.size());
    if (text.empty()) return parts;
    if (limit >= 0 && static_cast<int64_t>(parts.size()) >= limit) {
      parts.emplace_back(text);
      return parts;
    }
    size_t end = 0;
    while (end < text.size() && !is_python_space(utf8_step(text.substr(end)).code)) {
      end += utf8_step(text.substr(end)).length;
    }
    parts.emplace_back(text.substr(0, end));
    check_count(parts, budget);
    text.remove_prefix(end);
  }
}

}  // namespace

const std::string& require_string(const Value& value, std::string_view what) {
  const std::string* s = value.string();
  if (s == nullptr) {
    if (const auto* u = value.get_if<Value::Undefined>()) fail(*u->what);
    fail(fmt::format("{} must be a string, not {}", what, value.type_name()));
  }
  return *s;
}

size_t find_text(std::string_view text, std::string_view part, size_t from, Budget& budget) {
  if (from > text.size()) return std::string_view::npos;
  // What was not found costs the whole rest; what was, only the way to it.
  const char* begin = text.data() + from;
  const void* found = memmem(begin, text.size() - from, part.data(), part.size());
  const size_t at = found == nullptr
                        ? std::string_view::npos
                        : static_cast<size_t>(static_cast<const char*>(found) - text.data());
  budget.charge_search((found == nullptr ? text.size() : at) - from, part.size());
  return at;
}

size_t find_last(std::string_view text, std::string_view part, Budget& budget) {
  if (part.size() > kLongestMark)
    fail("a text of more than 256 bytes is not looked for from the right");
  const size_t at = text.rfind(part);
  budget.charge_search(text.size() - (at == std::string_view::npos ? 0 : at), part.size());
  return at;
}

std::string upper(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(), up);
  return out;
}

std::string lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(), down);
  return out;
}

std::string capitalize(std::string_view text) {
  std::string out = lower(text);
  if (!out.empty()) out[0] = up(out[0]);
  return out;
}

std::string title(std::string_view text) {
  std::string out;
  bool in_word = false;
  for (const char c : text) {
    out += in_word ? down(c) : up(c);
    in_word = is_letter(c);
  }
  return out;
}

std::string strip(std::string_view text, const Value& characters, bool left, bool right) {
  const bool space = characters.is_none();
  const std::string set = space ? std::string() : require_string(characters, "strip's argument");
  if (set.size() > kLongestMark) fail("strip's argument has more than 256 bytes");
  const auto goes = [&](std::string_view character) {
    return space ? is_python_space(utf8_step(character).code)
                 : set.find(character) != std::string::npos;
  };
  while (left && !text.empty() && goes(text.substr(0, utf8_step(text).length))) {
    text.remove_prefix(utf8_step(text).length);
  }
  while (right && !text.empty() && goes(text.substr(last_begin(text)))) {
    text = text.substr(0, last_begin(text));
  }
  return std::string(text);
}

std::string replace(std::string_view text, std::string_view from, std::string_view to,
                    int64_t count, Budget& budget) {
  std::string out;
  size_t at = 0;
  while (count != 0) {
    if (from.empty()) {  // between all characters, and at both ends
      out += to;
      if (at >= text.size()) break;
      const size_t n = utf8_step(text.substr(at)).length;
      out += text.substr(at, n);
      at += n;
    } else {
      const size_t found = find_text(text, from, at, budget);
      if (found == std::string_view::npos) break;
      out += text.substr(at, found - at);
      out += to;
      at = found + from.size();
    }
    budget.charge(1);
    budget.check_bytes(out.size());
    --count;
  }
  if (at < text.size()) out += text.substr(at);
  budget.check_bytes(out.size());
  budget.charge_bytes(text.size() + out.size());
  return out;
}

std::vector<Value> split(std::string_view text, const Value& separator, int64_t limit,
                         bool from_right, Budget& budget) {
  budget.charge(1 + text.size() / 8);
  if (separator.is_none()) {
    // From the right the same parts come out unless a limit is set, which no template asks for.
    if (from_right && limit >= 0) fail("rsplit without a separator takes no limit here");
    return split_space(text, limit, budget);
  }
  const std::string& mark = require_string(separator, "a separator");
  if (mark.empty()) fail("empty separator");
  std::vector<Value> parts;
  while (limit < 0 || static_cast<int64_t>(parts.size()) < limit) {
    const size_t found =
        from_right ? find_last(text, mark, budget) : find_text(text, mark, 0, budget);
    if (found == std::string_view::npos) break;
    if (from_right) {
      parts.emplace_back(text.substr(found + mark.size()));
      text = text.substr(0, found);
    } else {
      parts.emplace_back(text.substr(0, found));
      text.remove_prefix(found + mark.size());
    }
    check_count(parts, budget);
  }
  parts.emplace_back(text);
  if (from_right) std::reverse(parts.begin(), parts.end());
  return parts;
}

std::vector<Value> split_lines(std::string_view text, bool keep_ends, Budget& budget) {
  budget.charge(1 + text.size() / 8);
  std::vector<Value> lines;
  while (!text.empty()) {
    const size_t end = text.find_first_of("\n\r\v\f");
    if (end == std::string_view::npos) {
      lines.emplace_back(text);
      break;
    }
    const size_t mark = text.substr(end, 2) == "\r\n" ? 2 : 1;
    lines.emplace_back(text.substr(0, keep_ends ? end + mark : end));
    check_count(lines, budget);
    text.remove_prefix(end + mark);
  }
  return lines;
}

std::string join(const List& items, std::string_view separator, Budget& budget) {
  std::string out;
  for (size_t i = 0; i < items.items.size(); ++i) {
    if (i > 0) out += separator;
    out += to_text(items.items[i], budget);
    budget.charge_bytes(separator.size());
    budget.check_bytes(out.size());
  }
  return out;
}

std::string indent(std::string_view text, std::string_view by, bool first, bool blank,
                   Budget& budget) {
  std::string out;
  bool first_line = true;
  for (;;) {
    const size_t end = text.find('\n');
    const std::string_view line = text.substr(0, end);
    if (first_line ? first : blank || !line.empty()) out += by;
    out += line;
    budget.charge_bytes(by.size() + line.size());
    budget.check_bytes(out.size());
    if (end == std::string_view::npos) return out;
    out += '\n';
    text.remove_prefix(end + 1);
    first_line = false;
  }
}

}  // namespace sortie::text::jinja
