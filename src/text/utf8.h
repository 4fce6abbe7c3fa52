#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace sortie::text {

enum class Utf8Kind : uint8_t {
  kValid,       // `length` bytes are the character `code`
  kInvalid,     // the first `length` bytes can begin no character, whatever follows
  kIncomplete,  // all bytes are the beginning of a character whose rest is not there yet
};

struct Utf8Step {
  Utf8Kind kind;
  uint8_t length;
  char32_t code;
};

// The first character of non-empty `bytes`. Invalid lengths are the "maximal subparts" of the
// Unicode standard (section 3.9), as Rust's and WHATWG's lossy decoders count them.
Utf8Step utf8_step(std::string_view bytes);

bool is_valid_utf8(std::string_view bytes);
// The text with each invalid subpart replaced by U+FFFD.
std::string valid_utf8(std::string_view bytes);

void append_utf8(std::string& out, char32_t code);

// Characters of valid text; in other text every stray byte counts as one.
size_t utf8_length(std::string_view text);
// Byte offset of the character with this number, or text.size() past the end.
size_t utf8_offset(std::string_view text, size_t character);

// Unicode's White_Space property.
bool is_space(char32_t code);

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

}  // namespace sortie::text
