#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace sortie::text {

// GPT-2's byte alphabet (Radford et al., 2019, encoder.py): each byte is written as a printable
// character, 'Ġ' for a space. Vocabularies of byte-level BPE spell their tokens in it.

// The spelling of one byte, as UTF-8.
std::string byte_symbol(uint8_t byte);
// The bytes that a spelling stands for; nothing if a character is not of the alphabet.
std::optional<std::string> symbols_to_bytes(std::string_view symbols);

}  // namespace sortie::text
