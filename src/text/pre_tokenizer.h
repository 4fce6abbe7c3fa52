#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

struct pcre2_real_code_8;

namespace sortie::text {

// Cuts text into the words that BPE works on: the "pre_tokenizer" of tokenizer.json, which is a
// sequence of Split (and Digits) stages and a ByteLevel one. Each stage sees the pieces of the
// stage before as texts of their own: `$` and look-ahead end with the piece.
class PreTokenizer {
 public:
  static Result<PreTokenizer> make(const nlohmann::json& config);

  // The pieces of valid UTF-8 text, in order, as views of it.
  Status split(std::string_view text, std::vector<std::string_view>& pieces) const;

 private:
  struct FreeCode {
    void operator()(pcre2_real_code_8* code) const;
  };
  struct Stage {
    std::unique_ptr<pcre2_real_code_8, FreeCode> code;
    std::string pattern;  // for errors
    bool invert = false;  // what the pattern does not match counts as the match
    bool remove = false;  // matches are dropped; otherwise they are pieces of their own
  };
  class Matcher;

  Status add(const nlohmann::json& config, bool& byte_level);
  Status add_split(const nlohmann::json& config);
  Status add_stage(const std::string& pattern, bool literal, bool invert, bool remove);

  std::vector<Stage> stages_;
};

}  // namespace sortie::text
