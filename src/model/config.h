#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "model/quant_description.h"
#include "ops/ops.h"

namespace sortie::model {

constexpr int64_t kMaxConfigBytes = 16 << 20;  // of the text

// YaRN (Peng et al. 2023, as DeepSeek-V2/V3 and HF transformers apply it); factor 0 = plain RoPE.
struct RopeScaling {
  double factor = 0;
  double beta_fast = 32;
  double beta_slow = 1;
  double mscale = 1;
  double mscale_all_dim = 0;
  int64_t original_max_position = 4096;
};

// What config.json (and its quantisation relatives) says of the checkpoint's stored form.
enum class Dialect : uint8_t { kBf16, kFp8Block, kW4Afp8, kCompressedTensorsInt8, kModelSlim };

// A DeepSeek-family model with MLA: the values of HF's config.json under their own names.
struct Config {
  std::string model_type;
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t moe_intermediate_size = 0;
  int num_hidden_layers = 0;
  int num_nextn_predict_layers = 0;
  int num_attention_heads = 0;
  int n_shared_experts = 0;
  int n_routed_experts = 0;
  int num_experts_per_tok = 0;
  int n_group = 1;
  int topk_group = 1;
  int first_k_dense_replace = 0;
  int moe_layer_freq = 1;
  double routed_scaling_factor = 1;
  bool norm_topk_prob = false;
  ops::Scoring scoring_func = ops::Scoring::kSoftmax;
  ops::TopkMethod topk_method = ops::TopkMethod::kGreedy;
  int64_t q_lora_rank = 0;  // 0: q_proj straight from the hidden state
  int64_t kv_lora_rank = 0;
  int64_t qk_nope_head_dim = 0;
  int64_t qk_rope_head_dim = 0;
  int64_t v_head_dim = 0;
  bool attention_bias = false;
  bool tie_word_embeddings = false;
  double rms_norm_eps = 1e-6;
  double rope_theta = 10000;
  RopeScaling rope_scaling;
  int64_t max_position_embeddings = 0;
  int32_t bos_token_id = -1;
  std::vector<int32_t> eos_token_ids;

  Dialect dialect = Dialect::kBf16;
  bool ue8m0_scales = false;              // fp8_block: scale_fmt "ue8m0"
  std::vector<std::string> quant_ignore;  // compressed-tensors: modules left alone
  bool int8_static_activations = false;   // compressed-tensors: one activation scale a tensor
  std::shared_ptr<const QuantDescription> quant_description;  // kModelSlim: a scheme per linear

  bool is_moe_layer(int layer) const {
    return n_routed_experts > 0 && layer >= first_k_dense_replace && layer % moe_layer_freq == 0;
  }
  int64_t qk_head_dim() const { return qk_nope_head_dim + qk_rope_head_dim; }
  int64_t latent_width() const { return kv_lora_rank + qk_rope_head_dim; }
  // 1/sqrt(qk_head_dim) * yarn_mscale(factor, mscale_all_dim)^2
  double softmax_scale() const;
  // [max_position, qk_rope_head_dim/2, 2] cos, sin with YaRN's frequencies and mscale ratio.
  std::vector<float> cos_sin_table(int64_t max_position) const;
};

// Reads FOLDER/config.json, generation_config.json (eos ids, if it is there) and the quantisation
// files beside it. Refuses by name what Sortie cannot run (sparse indexer, GQA, unknown rope type,
// unknown quantisation) and absurd values.
Result<Config> load_config(const std::string& folder);
// The same from texts; all but the first may be empty. quant_description_json is msModelSlim's.
Result<Config> parse_config(std::string_view config_json, std::string_view hf_quant_config_json,
                            std::string_view generation_config_json,
                            std::string_view quant_description_json = {});

}  // namespace sortie::model
