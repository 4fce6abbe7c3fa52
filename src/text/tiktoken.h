#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "text/bpe.h"

namespace sortie::text {

// A vocabulary in the form of OpenAI's tiktoken: tiktoken.model has a line "base64(bytes) rank" for
// each token, and a token's rank is its id and its place in the order of merging at once.
struct TiktokenVocabulary {
  std::vector<std::string> tokens;  // by rank
  std::array<int32_t, 256> byte_ids{};

  // Any two neighbours that make a token may merge, however the token was first made; so a token
  // has one merge for each way to cut it into two others.
  std::vector<Bpe::Merge> merges() const;
};

// Ranks must be 0 to n-1, each once, and all bytes of UTF-8 tokens. Errors are clauses.
Result<TiktokenVocabulary> parse_tiktoken(std::string_view file);

// How Moonshot's models (Moonlight, Kimi-K2) cut text into words: pat_str of
// tokenization_moonshot.py and tokenization_kimi.py, which no data file holds. The original's
// classes are intersections, [A&&[^\p{Han}]]; PCRE2 has none, and (?!\p{Han})[A] is the same
// character. \p{Han} means the script there; PCRE2 takes it for the script extensions (10.40 and
// later) unless sc: says so.
extern const std::string kMoonshotPattern;

}  // namespace sortie::text
