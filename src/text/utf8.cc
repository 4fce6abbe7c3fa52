#include "text/utf8.h"

namespace sortie::text {
namespace {

uint8_t byte_at(std::string_view s, size_t i) { return static_cast<uint8_t>(s[i]); }

}  // namespace

Utf8Step utf8_step(std::string_view bytes) {
  const uint8_t lead = byte_at(bytes, 0);
  if (lead < 0x80) return {Utf8Kind::kValid, 1, lead};
  int length = 0;
  char32_t code = 0;
  uint8_t low = 0x80;
  uint8_t high = 0xBF;  // what the second byte may be
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2;
    code = lead & 0x1Fu;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    length = 3;
    code = lead & 0x0Fu;
    if (lead == 0xE0) low = 0xA0;   // no overlong forms
    if (lead == 0xED) high = 0x9F;  // no surrogates
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4;
    code = lead & 0x07u;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;  // nothing past U+10FFFF
  } else {
    return {Utf8Kind::kInvalid, 1, 0xFFFD};
  }
  for (int i = 1; i < length; ++i) {
    if (static_cast<size_t>(i) >= bytes.size()) {
      return {Utf8Kind::kIncomplete, static_cast<uint8_t>(i), 0xFFFD};
    }
    const uint8_t b = byte_at(bytes, static_cast<size_t>(i));
    if (b < low || b > high) return {Utf8Kind::kInvalid, static_cast<uint8_t>(i), 0xFFFD};
    low = 0x80;
    high = 0xBF;
    code = (code << 6) | (b & 0x3Fu);
  }
  return {Utf8Kind::kValid, static_cast<uint8_t>(length), code};
}

bool is_valid_utf8(std::string_view bytes) {
  while (!bytes.empty()) {
    const Utf8Step step = utf8_step(bytes);
    if (step.kind != Utf8Kind::kValid) return false;
    bytes.remove_prefix(step.length);
  }
  return true;
}

std::string valid_utf8(std::string_view bytes) {
  std::string out;
  out.reserve(bytes.size());
  while (!bytes.empty()) {
    const Utf8Step step = utf8_step(bytes);
    out += step.kind == Utf8Kind::kValid ? bytes.substr(0, step.length) : kReplacement;
    bytes.remove_prefix(step.length);
  }
  return out;
}

void append_utf8(std::string& out, char32_t code) {
  if (code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF)) code = 0xFFFD;
  if (code < 0x80) {
    out += static_cast<char>(code);
  } else if (code < 0x800) {
    out += static_cast<char>(0xC0 | (code >> 6));
    out += static_cast<char>(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    out += static_cast<char>(0xE0 | (code >> 12));
    out += static_cast<char>(0x80 | ((code >> 6) & 0x3F));
    out += static_cast<char>(0x80 | (code & 0x3F));
  } else {
    out += static_cast<char>(0xF0 | (code >> 18));
    out += static_cast<char>(0x80 | ((code >> 12) & 0x3F));
    out += static_cast<char>(0x80 | ((code >> 6) & 0x3F));
    out += static_cast<char>(0x80 | (code & 0x3F));
  }
}

size_t utf8_length(std::string_view text) {
  size_t n = 0;
  for (; !text.empty(); ++n) text.remove_prefix(utf8_step(text).length);
  return n;
}

size_t utf8_offset(std::string_view text, size_t character) {
  size_t at = 0;
  while (character > 0 && at < text.size()) {
    at += utf8_step(text.substr(at)).length;
    --character;
  }
  return at;
}

bool is_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

}  // namespace sortie::text
