// Reads tokenizer.json and tokenizer_config.json. Whatever the interpreter of these files does not
// do is refused by name: a token that differs silently is worse than a model that does not load.
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/json.h"
#include "text/byte_level.h"
#include "text/tiktoken.h"
#include "text/tokenizer.h"

namespace sortie::text {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxFile = int64_t{64} << 20;
constexpr size_t kMaxTokens = 1'000'000;
constexpr size_t kMaxAddedLength = 1024;
constexpr size_t kReservedTokens = 256;

const Json& member(const Json& object, const char* key) {
  static const Json kNull;
  if (!object.is_object()) return kNull;
  const auto it = object.find(key);
  return it == object.end() ? kNull : *it;
}

bool is_true(const Json& value) { return value.is_boolean() && value.get<bool>(); }

std::string type_of(const Json& object) {
  const Json& type = member(object, "type");
  return type.is_string() ? type.get<std::string>() : std::string("(no type)");
}

// A token that tokenizer_config.json names: "…" or {"content": "…"}.
std::string token_name(const Json& config, const char* key) {
  const Json& token = member(config, key);
  if (token.is_string()) return token.get<std::string>();
  const Json& content = member(token, "content");
  return content.is_string() ? content.get<std::string>() : std::string();
}

Status check_id(const Json& id, const std::string& token) {
  if (id.is_number_integer() && id.get<int64_t>() >= 0 &&
      id.get<int64_t>() < static_cast<int64_t>(kMaxTokens)) {
    return {};
  }
  return Status::invalid(
      fmt::format("the id of \"{}\" is not a number from 0 to {}", token, kMaxTokens - 1));
}

Result<Json> parse_settings(std::string_view config) {
  if (config.empty()) return Json();
  return parse_json(config, "tokenizer_config.json");
}

}  // namespace

// One reading of the two files into a Tokenizer. Errors here are clauses; parse() makes the
// sentence.
class TokenizerFile {
 public:
  explicit TokenizerFile(Tokenizer& tokenizer) : t_(tokenizer) {}

  Status read(const Json& file, const Json& config) {
    RETURN_IF_ERROR(refuse(file));
    RETURN_IF_ERROR(read_vocabulary(member(file, "model")));
    RETURN_IF_ERROR(read_merges(member(file, "model")));
    RETURN_IF_ERROR(read_added(member(file, "added_tokens")));
    ASSIGN_OR_RETURN(t_.pre_tokenizer_, PreTokenizer::make(member(file, "pre_tokenizer")));
    index_tokens(config);
    bool templated = false;
    RETURN_IF_ERROR(read_post_processor(member(file, "post_processor"), templated));
    return templated ? Status() : add_from_config(config);
  }

  // tokenizer_config.json names the added tokens; the ids that it leaves open behind the vocabulary
  // are reserved ones, as in Moonshot's tokenization_kimi.py.
  Status read_tiktoken(std::string_view model, const Json& config) {
    ASSIGN_OR_RETURN(TiktokenVocabulary vocabulary, parse_tiktoken(model));
    t_.bpe_ = Bpe(vocabulary.byte_ids, vocabulary.merges());
    t_.ignore_merges_ = true;
    const size_t base = vocabulary.tokens.size();
    for (std::string& bytes : vocabulary.tokens) t_.tokens_.push_back({std::move(bytes), false});
    Json added = Json::array();
    for (size_t id = base; id < base + kReservedTokens; ++id) {
      const Json& named =
          member(member(config, "added_tokens_decoder"), std::to_string(id).c_str());
      if (named.is_null()) {
        added.push_back({{"content", fmt::format("<|reserved_token_{}|>", id)}, {"special", true}});
      } else {
        added.push_back(named);
      }
      if (added.back().is_object()) added.back()["id"] = id;
    }
    RETURN_IF_ERROR(read_added(added));
    ASSIGN_OR_RETURN(t_.pre_tokenizer_, PreTokenizer::make(split_by(kMoonshotPattern)));
    index_tokens(config);
    return add_from_config(config);
  }

 private:
  static Json split_by(const std::string& pattern) {
    const Json split = {
        {"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}};
    const Json bytes = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
    return {{"type", "Sequence"}, {"pretokenizers", {split, bytes}}};
  }

  // A step of the file ("normalizer", "decoder") is nothing, of the one type that is what happens
  // anyway, or a sequence of such steps.
  static Status refuse_step(const Json& step, const std::string& what, const char* known) {
    if (step.is_null() || (known != nullptr && type_of(step) == known)) return {};
    const Json& list = member(step, (what + "s").c_str());
    if (type_of(step) != "Sequence" || !list.is_array()) {
      return Status::invalid(fmt::format("{}: the type {} is not supported", what, type_of(step)));
    }
    for (const Json& item : list) RETURN_IF_ERROR(refuse_step(item, what, known));
    return {};
  }

  static Status refuse(const Json& file) {
    if (!file.is_object()) return Status::invalid("it is not a JSON object");
    RETURN_IF_ERROR(refuse_step(member(file, "normalizer"), "normalizer", nullptr));
    RETURN_IF_ERROR(refuse_step(member(file, "decoder"), "decoder", "ByteLevel"));
    const Json& model = member(file, "model");
    const Json& type = member(model, "type");
    if (!model.is_object() || (!type.is_null() && type != "BPE")) {
      return Status::invalid(
          fmt::format("model: the type {} is not supported, only BPE is", type_of(model)));
    }
    for (const char* affix : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      const Json& value = member(model, affix);
      if (!value.is_null() && !(value.is_string() && value.get_ref<const std::string&>().empty())) {
        return Status::invalid(fmt::format("model: {} is not supported", affix));
      }
    }
    const Json& dropout = member(model, "dropout");
    if (dropout.is_number() && dropout.get<double>() != 0) {
      return Status::invalid("model: dropout is not supported");
    }
    return {};
  }

  Tokenizer::Token& token(int64_t id) {
    const auto i = static_cast<size_t>(id);
    if (i >= t_.tokens_.size()) t_.tokens_.resize(i + 1);
    return t_.tokens_[i];
  }

  Status read_vocabulary(const Json& model) {
    const Json& vocabulary = member(model, "vocab");
    if (!vocabulary.is_object() || vocabulary.empty() || vocabulary.size() > kMaxTokens) {
      return Status::invalid(
          fmt::format("model.vocab is not an object of 1 to {} tokens", kMaxTokens));
    }
    t_.ignore_merges_ = is_true(member(model, "ignore_merges"));
    vocabulary_.reserve(vocabulary.size());
    std::vector<bool> used;
    for (const auto& [spelling, id] : vocabulary.items()) {
      RETURN_IF_ERROR(check_id(id, spelling));
      const auto i = id.get<size_t>();
      if (i >= used.size()) used.resize(std::max(i + 1, used.size() * 2));
      if (used[i]) {
        return Status::invalid(
            fmt::format("two tokens have the id {}, \"{}\" and another", i, spelling));
      }
      used[i] = true;
      vocabulary_.emplace(spelling, static_cast<int32_t>(i));
      // A spelling outside the byte alphabet is an added token's; it stands for its own text.
      const auto bytes = symbols_to_bytes(spelling);
      token(static_cast<int64_t>(i)).bytes = bytes ? *bytes : spelling;
    }
    return {};
  }

  // Both forms in use: "a b" and ["a", "b"].
  Status read_merge(const Json& entry, Bpe::Merge& merge) const {
    std::string left;
    std::string right;
    if (entry.is_string()) {
      const auto& text = entry.get_ref<const std::string&>();
      const size_t space = text.find(' ');
      if (space != std::string::npos) {
        left = text.substr(0, space);
        right = text.substr(space + 1);
      }
    } else if (entry.is_array() && entry.size() == 2 && entry[0].is_string() &&
               entry[1].is_string()) {
      left = entry[0].get<std::string>();
      right = entry[1].get<std::string>();
    }
    if (left.empty() || right.empty()) {
      return Status::invalid("an entry of model.merges is neither \"a b\" nor [\"a\", \"b\"]");
    }
    const auto id = [&](const std::string& spelling) {
      const auto it = vocabulary_.find(spelling);
      return it == vocabulary_.end() ? -1 : it->second;
    };
    merge = {id(left), id(right), id(left + right), merge.rank};
    if (merge.left < 0 || merge.right < 0 || merge.result < 0) {
      return Status::invalid(fmt::format(
          "the merge of \"{}\" and \"{}\" names or makes a token that model.vocab lacks", left,
          right));
    }
    return {};
  }

  Status read_merges(const Json& model) {
    const Json& list = member(model, "merges");
    if (!list.is_array() || list.size() > kMaxTokens) {
      return Status::invalid(
          fmt::format("model.merges is not a list of at most {} merges", kMaxTokens));
    }
    std::vector<Bpe::Merge> merges(list.size());
    for (size_t i = 0; i < merges.size(); ++i) {
      merges[i].rank = static_cast<int32_t>(i);
      RETURN_IF_ERROR(read_merge(list[i], merges[i]));
    }
    std::array<int32_t, 256> byte_ids{};
    for (int b = 0; b < 256; ++b) {
      const auto it = vocabulary_.find(byte_symbol(static_cast<uint8_t>(b)));
      byte_ids[static_cast<size_t>(b)] = it == vocabulary_.end() ? -1 : it->second;
      const bool in_utf8 = b != 0xC0 && b != 0xC1 && b < 0xF5;
      if (it == vocabulary_.end() && in_utf8) {
        return Status::invalid(
            fmt::format("model.vocab has no token for the byte 0x{:02X}, so text with it would be "
                        "lost",
                        b));
      }
    }
    t_.bpe_ = Bpe(byte_ids, merges);
    return {};
  }

  Status read_added(const Json& list) {
    if (list.is_null()) return {};
    if (!list.is_array() || list.size() > kMaxTokens) {
      return Status::invalid(
          fmt::format("added_tokens is not a list of at most {} tokens", kMaxTokens));
    }
    std::vector<AddedToken> added;
    std::unordered_map<int32_t, std::string> by_id;
    for (const Json& entry : list) {
      const Json& content = member(entry, "content");
      if (!content.is_string() || content.get_ref<const std::string&>().size() > kMaxAddedLength) {
        return Status::invalid(fmt::format(
            "an added token's content is not a text of at most {} bytes", kMaxAddedLength));
      }
      AddedToken item;
      item.content = content.get<std::string>();
      if (item.content.empty()) continue;
      RETURN_IF_ERROR(check_id(member(entry, "id"), item.content));
      item.id = member(entry, "id").get<int32_t>();
      item.special = is_true(member(entry, "special"));
      item.lstrip = is_true(member(entry, "lstrip"));
      item.rstrip = is_true(member(entry, "rstrip"));
      item.single_word = is_true(member(entry, "single_word"));
      item.normalized = is_true(member(entry, "normalized"));
      const auto in_vocabulary = vocabulary_.find(item.content);
      const bool moved = in_vocabulary != vocabulary_.end() && in_vocabulary->second != item.id;
      const bool taken =
          in_vocabulary == vocabulary_.end() && static_cast<size_t>(item.id) < t_.tokens_.size() &&
          !t_.tokens_[static_cast<size_t>(item.id)].bytes.empty() && !by_id.contains(item.id);
      const auto [same, fresh] = by_id.try_emplace(item.id, item.content);
      if (moved || taken || (!fresh && same->second != item.content)) {
        return Status::invalid(fmt::format(
            "the added token \"{}\" has the id {}, which another token has or which differs from "
            "its id in model.vocab",
            item.content, item.id));
      }
      token(item.id) = {item.content, item.special};
      added.push_back(std::move(item));
    }
    t_.added_ = AddedTokens(std::move(added));
    for (const auto& [id, content] : by_id) added_ids_.push_back(id);
    return {};
  }

  // Added tokens first: where a vocabulary token has the same bytes, the added one is meant.
  void index_tokens(const Json& config) {
    t_.id_.reserve(t_.tokens_.size());
    const auto add = [&](int32_t id) {
      const std::string& bytes = t_.tokens_[static_cast<size_t>(id)].bytes;
      if (!bytes.empty()) t_.id_.try_emplace(bytes, id);
    };
    for (const int32_t id : added_ids_) add(id);
    for (int32_t id = 0; id < t_.vocab_size(); ++id) add(id);
    t_.bos_ = t_.id_of(token_name(config, "bos_token"));
    t_.eos_ = t_.id_of(token_name(config, "eos_token"));
  }

  // TemplateProcessing says what stands around one text; ByteLevel only moves offsets.
  Status read_post_processor(const Json& processor, bool& templated) {
    if (processor.is_null()) return {};
    const std::string type = type_of(processor);
    if (type == "ByteLevel") return {};
    if (type == "Sequence" && member(processor, "processors").is_array()) {
      for (const Json& item : member(processor, "processors")) {
        RETURN_IF_ERROR(read_post_processor(item, templated));
      }
      return {};
    }
    if (type != "TemplateProcessing" || templated) {
      return Status::invalid(fmt::format(
          "post_processor: {} {}", type,
          templated ? "after a TemplateProcessing is not supported" : "is not supported"));
    }
    templated = true;
    for (const Json& piece : member(processor, "single")) {
      if (piece.is_object() && piece.contains("Sequence")) {
        t_.template_.push_back(Tokenizer::kText);
        continue;
      }
      const Json& name = member(member(piece, "SpecialToken"), "id");
      const Json& ids = name.is_string()
                            ? member(member(member(processor, "special_tokens"),
                                            name.get_ref<const std::string&>().c_str()),
                                     "ids")
                            : name;
      if (!ids.is_array()) {
        return Status::invalid("post_processor: TemplateProcessing names a token without ids");
      }
      for (const Json& id : ids) {
        RETURN_IF_ERROR(check_id(id, name.get<std::string>()));
        t_.template_.push_back(id.get<int32_t>());
      }
    }
    if (std::count(t_.template_.begin(), t_.template_.end(), Tokenizer::kText) != 1) {
      return Status::invalid("post_processor: TemplateProcessing does not hold the text once");
    }
    return {};
  }

  Status add_from_config(const Json& config) {
    if (is_true(member(config, "add_bos_token"))) {
      if (!t_.bos_) return Status::invalid("add_bos_token is set, but bos_token is not a token");
      t_.template_.push_back(*t_.bos_);
    }
    t_.template_.push_back(Tokenizer::kText);
    if (is_true(member(config, "add_eos_token"))) {
      if (!t_.eos_) return Status::invalid("add_eos_token is set, but eos_token is not a token");
      t_.template_.push_back(*t_.eos_);
    }
    return {};
  }

  Tokenizer& t_;
  std::unordered_map<std::string, int32_t> vocabulary_;  // spelling -> id
  std::vector<int32_t> added_ids_;
};

namespace {

Result<std::shared_ptr<const Tokenizer>> finished(std::shared_ptr<const Tokenizer> tokenizer,
                                                  const Status& status, const char* file) {
  if (status.is_ok()) return tokenizer;
  return Status::invalid(fmt::format("{} cannot be used: {}.", file, status.message()));
}

}  // namespace

Result<std::shared_ptr<const Tokenizer>> Tokenizer::parse(std::string_view tokenizer,
                                                          std::string_view config) {
  ASSIGN_OR_RETURN(const Json file, parse_json(tokenizer, "tokenizer.json"));
  ASSIGN_OR_RETURN(const Json settings, parse_settings(config));
  auto result = std::make_shared<Tokenizer>();
  const Status status = TokenizerFile(*result).read(file, settings);
  return finished(std::move(result), status, "tokenizer.json");
}

Result<std::shared_ptr<const Tokenizer>> Tokenizer::parse_tiktoken(std::string_view model,
                                                                   std::string_view config) {
  ASSIGN_OR_RETURN(const Json settings, parse_settings(config));
  auto result = std::make_shared<Tokenizer>();
  const Status status = TokenizerFile(*result).read_tiktoken(model, settings);
  return finished(std::move(result), status, "tiktoken.model");
}

Result<std::shared_ptr<const Tokenizer>> Tokenizer::load(const std::string& folder) {
  const bool tiktoken =
      !file_exists(folder + "/tokenizer.json") && file_exists(folder + "/tiktoken.model");
  const std::string path = folder + (tiktoken ? "/tiktoken.model" : "/tokenizer.json");
  if (!file_exists(path) && file_exists(folder + "/tokenizer.model")) {
    return Status::invalid(
        fmt::format("{} has tokenizer.model but neither tokenizer.json nor tiktoken.model; convert "
                    "it to tokenizer.json first.",
                    folder));
  }
  ASSIGN_OR_RETURN(const std::string file, read_text_file(path, kMaxFile));
  std::string config;
  const std::string config_path = folder + "/tokenizer_config.json";
  if (file_exists(config_path)) {
    ASSIGN_OR_RETURN(config, read_text_file(config_path, kMaxFile));
  }
  auto result = tiktoken ? parse_tiktoken(file, config) : parse(file, config);
  if (!result.is_ok()) {
    return Status::invalid(fmt::format("{}: {}", folder, result.status().message()));
  }
  return result;
}

}  // namespace sortie::text
