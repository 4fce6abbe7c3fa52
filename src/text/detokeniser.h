#pragma once

#include <cstdint>
#include <string>

#include "text/tokenizer.h"

namespace sortie::text {

// Turns a stream of ids into a stream of text: every piece is valid UTF-8, and the pieces together
// are what Tokenizer::decode gives. A character whose bytes are spread over tokens waits for its
// last one; bytes that can become no character turn into U+FFFD as soon as that is known. The
// tokenizer must outlive it.
class Detokeniser {
 public:
  Detokeniser(const Tokenizer& tokenizer, bool skip_special)
      : tokenizer_(&tokenizer), skip_special_(skip_special) {}

  std::string push(int32_t id);
  // What is left: U+FFFD for a character that was never completed.
  std::string finish();

 private:
  const Tokenizer* tokenizer_;
  bool skip_special_;
  std::string held_;  // the beginning of a character, at most 3 bytes
};

}  // namespace sortie::text
