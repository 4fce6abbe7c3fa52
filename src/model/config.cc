#include "model/config.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <string>

#include "base/json.h"
#include "model/config_quantization.h"
#include "model/config_reader.h"

namespace sortie::model {
namespace {

constexpr int64_t kMaxDescriptionBytes = 64 << 20;
constexpr int64_t kMaxWidth = 1 << 20;  // any one dimension but the vocabulary

// Refuses architectures by name. What passes has MLA as DeepSeek-V2 and V3 do it.
Status check_architecture(const nlohmann::json& j, const std::string& type) {
  if (j.contains("index_topk") || j.contains("index_n_heads") || type == "deepseek_v32") {
    return Status::invalid(
        "This model has DeepSeek-V3.2's sparse attention indexer (index_topk), which Sortie does "
        "not have yet; use V3, R1 or V3.1.");
  }
  if (type.empty() && j.contains("dim") && j.contains("n_layers")) {
    return Status::invalid(
        "config.json is DeepSeek's native inference config (\"dim\", \"n_layers\"); use the "
        "Hugging Face config.json of the model.");
  }
  if (type.empty()) return Status::invalid("config.json lacks \"model_type\".");
  if (type == "deepseek_v2" || type == "deepseek_v3" || type == "kimi_k2") {
    if (j.contains("kv_lora_rank") && !j["kv_lora_rank"].is_null()) return Status::ok();
    return Status::invalid(fmt::format(
        "config.json of model_type \"{}\" lacks \"kv_lora_rank\": Sortie runs only models with "
        "multi-head latent attention (MLA).",
        type));
  }
  const bool mla = j.contains("kv_lora_rank") && !j["kv_lora_rank"].is_null();
  return Status::invalid(fmt::format(
      "model_type \"{}\" is not supported{}; Sortie runs deepseek_v2, deepseek_v3 and kimi_k2.",
      type.substr(0, 60),
      mla ? "" : ": it has no kv_lora_rank, that is, grouped-query attention instead of MLA"));
}

void read_rope(ConfigReader& top, Config& c) {
  // transformers 5 writes rope_parameters, earlier versions rope_theta and rope_scaling.
  const char* key = top.has("rope_parameters") ? "rope_parameters" : "rope_scaling";
  const nlohmann::json* scaling = top.find(key);
  if (!top.boolean("rope_interleave", true)) {
    top.fail("config.json: \"rope_interleave\" = false is not supported.");
  }
  c.rope_theta = top.real("rope_theta", 10000.0, 1.0001, 1e12);
  if (scaling == nullptr) return;
  if (!scaling->is_object()) {
    top.fail(fmt::format("config.json: \"{}\" is not an object.", key));
    return;
  }
  ConfigReader r(*scaling, fmt::format("config.json: {}", key));
  const std::string type = r.string("rope_type", r.string("type", "default"));
  c.rope_theta = r.real("rope_theta", c.rope_theta, 1.0001, 1e12);
  if (type == "yarn") {
    RopeScaling& y = c.rope_scaling;
    y.factor = r.real("factor", std::nullopt, 1, 1e6);
    y.beta_fast = r.real("beta_fast", 32, 1e-6, 1e9);
    y.beta_slow = r.real("beta_slow", 1, 1e-6, 1e9);
    y.mscale = r.real("mscale", 1, 0, 1e3);
    y.mscale_all_dim = r.real("mscale_all_dim", 0, 0, 1e3);
    y.original_max_position = r.integer("original_max_position_embeddings", 4096, 1, 1 << 30);
    if (y.beta_slow > y.beta_fast) r.fail("config.json: beta_slow is larger than beta_fast.");
    if (r.has("attention_factor") || !r.boolean("truncate", true)) {
      r.fail("config.json: YaRN with attention_factor or without truncation is not supported.");
    }
  } else if (type != "default" && type != "none") {
    r.fail(fmt::format(
        "config.json: {} of type \"{}\" is not supported; Sortie has yarn and plain RoPE.", key,
        type.substr(0, 60)));
  }
  if (!r.status().is_ok()) top.fail(r.status().message());
}

void read_routing(ConfigReader& r, Config& c) {
  const bool v2 = c.model_type == "deepseek_v2";
  c.n_shared_experts = static_cast<int>(r.integer("n_shared_experts", 0, 0, 1024));
  c.n_routed_experts = static_cast<int>(r.integer("n_routed_experts", 0, 0, 65536));
  c.moe_layer_freq = static_cast<int>(r.integer("moe_layer_freq", 1, 1, 1000));
  c.first_k_dense_replace = static_cast<int>(r.integer("first_k_dense_replace", 0, 0, 1000));
  c.routed_scaling_factor = r.real("routed_scaling_factor", 1, 1e-6, 1e6);
  c.norm_topk_prob = r.boolean("norm_topk_prob", !v2);
  const std::string scoring = r.string("scoring_func", v2 ? "softmax" : "sigmoid");
  if (scoring == "softmax") {
    c.scoring_func = ops::Scoring::kSoftmax;
  } else if (scoring == "sigmoid") {
    c.scoring_func = ops::Scoring::kSigmoid;
  } else {
    r.fail(fmt::format(
        "config.json: scoring_func \"{}\" is not supported; Sortie has softmax and sigmoid.",
        scoring.substr(0, 60)));
  }
  const std::string method = r.string("topk_method", v2 ? "greedy" : "noaux_tc");
  if (method == "greedy" || method == "gready") {  // HF's default has the misspelling
    c.topk_method = ops::TopkMethod::kGreedy;
  } else if (method == "group_limited_greedy") {
    c.topk_method = ops::TopkMethod::kGroupLimitedGreedy;
  } else if (method == "noaux_tc") {
    c.topk_method = ops::TopkMethod::kNoauxTc;
  } else {
    r.fail(
        fmt::format("config.json: topk_method \"{}\" is not supported; Sortie has greedy, "
                    "group_limited_greedy and noaux_tc.",
                    method.substr(0, 60)));
  }
  if (c.n_routed_experts == 0) return;
  c.moe_intermediate_size = r.integer("moe_intermediate_size", std::nullopt, 1, kMaxWidth);
  c.num_experts_per_tok =
      static_cast<int>(r.integer("num_experts_per_tok", std::nullopt, 1, c.n_routed_experts));
  c.n_group = static_cast<int>(r.integer("n_group", 1, 1, c.n_routed_experts));
  c.topk_group = static_cast<int>(r.integer("topk_group", 1, 1, c.n_group));
  if (c.n_routed_experts % c.n_group != 0) {
    r.fail(fmt::format("config.json: \"n_group\" = {} does not divide \"n_routed_experts\" = {}.",
                       c.n_group, c.n_routed_experts));
    return;
  }
  const int in_group = c.n_routed_experts / c.n_group;
  if (c.topk_method != ops::TopkMethod::kGreedy &&
      c.num_experts_per_tok > c.topk_group * in_group) {
    r.fail(
        fmt::format("config.json: \"num_experts_per_tok\" = {} exceeds the {} experts of "
                    "\"topk_group\" = {} groups.",
                    c.num_experts_per_tok, c.topk_group * in_group, c.topk_group));
  }
  if (c.topk_method == ops::TopkMethod::kNoauxTc && c.n_group > 1 && in_group < 2) {
    r.fail(
        fmt::format("config.json: \"n_group\" = {} leaves one expert a group; noaux_tc scores "
                    "a group by its best two.",
                    c.n_group));
  }
}

void read_attention(ConfigReader& r, Config& c) {
  c.num_attention_heads = static_cast<int>(r.integer("num_attention_heads", std::nullopt, 1, 4096));
  const int64_t kv_heads = r.integer("num_key_value_heads", c.num_attention_heads, 1, 4096);
  if (kv_heads != c.num_attention_heads) {
    r.fail(
        fmt::format("config.json: \"num_key_value_heads\" = {} differs from "
                    "\"num_attention_heads\" = {}; MLA has one key per query head.",
                    kv_heads, c.num_attention_heads));
  }
  c.q_lora_rank = r.integer("q_lora_rank", 0, 0, kMaxWidth);
  c.kv_lora_rank = r.integer("kv_lora_rank", std::nullopt, 1, kMaxWidth);
  c.qk_nope_head_dim = r.integer("qk_nope_head_dim", std::nullopt, 1, 65536);
  c.qk_rope_head_dim = r.integer("qk_rope_head_dim", std::nullopt, 2, 65536);
  c.v_head_dim = r.integer("v_head_dim", std::nullopt, 1, 65536);
  if (c.qk_rope_head_dim % 2 != 0) {
    r.fail(fmt::format("config.json: \"qk_rope_head_dim\" = {} is odd.", c.qk_rope_head_dim));
  }
  // Matrix sizes below stay far from overflow, and no real model comes near 2^40 elements.
  const int64_t widest =
      c.num_attention_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim);
  if (widest > (int64_t{1} << 40) / std::max({c.hidden_size, c.q_lora_rank, c.kv_lora_rank})) {
    r.fail(
        fmt::format("config.json: \"num_attention_heads\" = {} times the head sizes gives an "
                    "absurd matrix.",
                    c.num_attention_heads));
  }
  c.attention_bias = r.boolean("attention_bias", false);
}

// An id, or a list of ids, under "eos_token_id"; new ones are appended.
void read_eos(ConfigReader& r, const std::string& where, Config& c) {
  const nlohmann::json* v = r.find("eos_token_id");
  if (v == nullptr) return;
  const nlohmann::json list = v->is_array() ? *v : nlohmann::json::array({*v});
  for (const auto& id : list) {
    const double d = id.is_number() ? id.get<double>() : -1;
    if (d != std::floor(d) || d < 0 || d >= static_cast<double>(c.vocab_size)) {
      r.fail(fmt::format(
          "{}: \"eos_token_id\" holds {}, which is no token id below {}.", where,
          id.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).substr(0, 60),
          c.vocab_size));
      return;
    }
    const auto token = static_cast<int32_t>(d);
    if (std::find(c.eos_token_ids.begin(), c.eos_token_ids.end(), token) == c.eos_token_ids.end()) {
      c.eos_token_ids.push_back(token);
    }
  }
}

Status read_sizes(const nlohmann::json& j, Config& c) {
  ConfigReader r(j, "config.json");
  c.vocab_size = r.integer("vocab_size", std::nullopt, 1, 1 << 24);
  c.hidden_size = r.integer("hidden_size", std::nullopt, 1, kMaxWidth);
  c.intermediate_size = r.integer("intermediate_size", std::nullopt, 1, kMaxWidth);
  c.num_hidden_layers = static_cast<int>(r.integer("num_hidden_layers", std::nullopt, 1, 1000));
  c.num_nextn_predict_layers = static_cast<int>(r.integer("num_nextn_predict_layers", 0, 0, 16));
  c.max_position_embeddings =
      r.integer("max_position_embeddings", std::nullopt, 1, int64_t{1} << 30);
  c.rms_norm_eps = r.real("rms_norm_eps", 1e-6, 1e-30, 1);
  c.tie_word_embeddings = r.boolean("tie_word_embeddings", false);
  if (const std::string act = r.string("hidden_act", "silu"); act != "silu") {
    r.fail(fmt::format("config.json: hidden_act \"{}\" is not supported; Sortie has silu.",
                       act.substr(0, 60)));
  }
  RETURN_IF_ERROR(r.status());
  read_routing(r, c);
  read_attention(r, c);
  read_rope(r, c);
  c.bos_token_id = static_cast<int32_t>(r.integer("bos_token_id", -1, -1, c.vocab_size - 1));
  read_eos(r, "config.json", c);
  return r.status();
}

}  // namespace

Result<Config> parse_config(std::string_view config_json, std::string_view hf_quant_config_json,
                            std::string_view generation_config_json,
                            std::string_view quant_description_json) {
  ASSIGN_OR_RETURN(const nlohmann::json j, parse_json(config_json, "config.json"));
  if (!j.is_object()) return Status::invalid("config.json is not a JSON object.");
  Config c;
  ConfigReader r(j, "config.json");
  c.model_type = r.string("model_type", "");
  RETURN_IF_ERROR(r.status());
  RETURN_IF_ERROR(check_architecture(j, c.model_type));
  RETURN_IF_ERROR(read_sizes(j, c));
  RETURN_IF_ERROR(detect_dialect(j, hf_quant_config_json, quant_description_json, c));
  if (!generation_config_json.empty()) {
    const std::string where = "generation_config.json";
    ASSIGN_OR_RETURN(const nlohmann::json g, parse_json(generation_config_json, where));
    if (!g.is_object()) return Status::invalid(where + " is not a JSON object.");
    ConfigReader gr(g, where);
    read_eos(gr, where, c);
    RETURN_IF_ERROR(gr.status());
  }
  return c;
}

Result<Config> load_config(const std::string& folder) {
  struct stat info {};
  if (::stat(folder.c_str(), &info) != 0) {
    return Status::invalid(fmt::format("There is no model folder {}.", folder));
  }
  if (!S_ISDIR(info.st_mode)) {
    return Status::invalid(
        fmt::format("{} is not a folder; name the folder that holds config.json.", folder));
  }
  const auto optional = [&](const char* name) -> Result<std::string> {
    const std::string path = folder + "/" + name;
    if (::stat(path.c_str(), &info) != 0) return std::string();
    return read_text_file(path, kMaxConfigBytes);
  };
  if (::stat((folder + "/config.json").c_str(), &info) != 0) {
    return Status::invalid(fmt::format("{} holds no config.json.", folder));
  }
  ASSIGN_OR_RETURN(const std::string config,
                   read_text_file(folder + "/config.json", kMaxConfigBytes));
  ASSIGN_OR_RETURN(const std::string quant, optional("hf_quant_config.json"));
  ASSIGN_OR_RETURN(const std::string generation, optional("generation_config.json"));
  std::string description;  // msModelSlim's own name first, then those that it wrote before
  for (const char* name :
       {"quant_model_description.json", "quant_model_description_w8a8_dynamic.json",
        "quant_model_description_w8a8.json"}) {
    if (::stat((folder + "/" + name).c_str(), &info) != 0) continue;
    ASSIGN_OR_RETURN(description, read_text_file(folder + "/" + name, kMaxDescriptionBytes));
    if (description.empty()) return Status::invalid(fmt::format("{}/{} is empty.", folder, name));
    break;
  }
  Result<Config> parsed = parse_config(config, quant, generation, description);
  if (parsed.is_ok()) return parsed;
  return Status(parsed.status().code(), fmt::format("{}: {}", folder, parsed.status().message()));
}

}  // namespace sortie::model
