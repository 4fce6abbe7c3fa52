#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "text/added_tokens.h"
#include "text/bpe.h"
#include "text/pre_tokenizer.h"

namespace sortie::text {

// A byte-level BPE tokenizer in the format of Hugging Face's tokenizer.json. Immutable, so one may
// serve all threads.
class Tokenizer {
 public:
  // Reads tokenizer.json, or tiktoken.model as Moonlight and Kimi-K2 have it, and, where there is
  // one, tokenizer_config.json of a model folder.
  static Result<std::shared_ptr<const Tokenizer>> load(const std::string& folder);
  // The same from the files' text; an empty `config` stands for a missing file.
  static Result<std::shared_ptr<const Tokenizer>> parse(std::string_view tokenizer,
                                                        std::string_view config);
  static Result<std::shared_ptr<const Tokenizer>> parse_tiktoken(std::string_view model,
                                                                 std::string_view config);

  // Bytes that are not UTF-8 count as U+FFFD. `add_special`: with BOS and whatever else the model's
  // post-processor adds. Fails only where the model's own pattern gives up on the text.
  Result<std::vector<int32_t>> encode(std::string_view text, bool add_special) const;
  // Valid UTF-8. Ids that stand for no token give nothing.
  std::string decode(std::span<const int32_t> ids, bool skip_special) const;

  // The bytes of a token (not always whole characters); empty for an id that stands for none.
  std::string_view token_bytes(int32_t id) const;
  std::optional<int32_t> id_of(std::string_view content) const;
  bool is_special(int32_t id) const;
  // One past the largest id. A model's embedding may have more rows.
  int32_t vocab_size() const { return static_cast<int32_t>(tokens_.size()); }
  std::optional<int32_t> bos_id() const { return bos_; }
  std::optional<int32_t> eos_id() const { return eos_; }

 private:
  friend class TokenizerFile;

  struct Token {
    std::string bytes;
    bool special = false;
  };
  static constexpr int32_t kText = -1;  // the text's place in template_

  Status encode_text(std::string_view text, std::vector<int32_t>& ids) const;

  std::vector<Token> tokens_;                         // by id
  std::unordered_map<std::string_view, int32_t> id_;  // bytes (of tokens_) -> id
  AddedTokens added_;
  PreTokenizer pre_tokenizer_;
  Bpe bpe_;
  bool ignore_merges_ = false;     // a word that is a token is taken whole
  std::vector<int32_t> template_;  // what add_special gives: ids, and kText once
  std::optional<int32_t> bos_;
  std::optional<int32_t> eos_;
};

}  // namespace sortie::text
