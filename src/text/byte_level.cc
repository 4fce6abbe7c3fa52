#include "text/byte_level.h"

#include <array>

#include "text/utf8.h"

namespace sortie::text {
namespace {

constexpr int kCodes = 0x144;  // the alphabet's characters are below U+0144

struct Alphabet {
  std::array<char32_t, 256> code{};
  std::array<int16_t, kCodes> byte{};
};

// Printable Latin-1 stands for itself; the other bytes take U+0100 and up in order.
Alphabet make_alphabet() {
  Alphabet alphabet;
  alphabet.byte.fill(-1);
  char32_t next = 0x100;
  for (int b = 0; b < 256; ++b) {
    const bool itself =
        (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
    const char32_t code = itself ? static_cast<char32_t>(b) : next++;
    alphabet.code[static_cast<size_t>(b)] = code;
    alphabet.byte[code] = static_cast<int16_t>(b);
  }
  return alphabet;
}

const Alphabet& alphabet() {
  static const Alphabet kAlphabet = make_alphabet();
  return kAlphabet;
}

}  // namespace

std::string byte_symbol(uint8_t byte) {
  std::string symbol;
  append_utf8(symbol, alphabet().code[byte]);
  return symbol;
}

std::optional<std::string> symbols_to_bytes(std::string_view symbols) {
  std::string bytes;
  while (!symbols.empty()) {
    const Utf8Step step = utf8_step(symbols);
    if (step.kind != Utf8Kind::kValid || step.code >= kCodes) return std::nullopt;
    const int16_t byte = alphabet().byte[step.code];
    if (byte < 0) return std::nullopt;
    bytes += static_cast<char>(byte);
    symbols.remove_prefix(step.length);
  }
  return bytes;
}

}  // namespace sortie::text
