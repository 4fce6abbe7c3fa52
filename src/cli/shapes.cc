#include "cli/shapes.h"

#include <fmt/format.h>

namespace sortie::cli {

namespace {

// DeepSeek-V2-Lite's config.json values.
model::Config v2_lite() {
  model::Config c;
  c.model_type = "deepseek_v2";
  c.vocab_size = 102400;
  c.hidden_size = 2048;
  c.intermediate_size = 10944;
  c.moe_intermediate_size = 1408;
  c.num_hidden_layers = 27;
  c.num_attention_heads = 16;
  c.n_shared_experts = 2;
  c.n_routed_experts = 64;
  c.num_experts_per_tok = 6;
  c.first_k_dense_replace = 1;
  c.kv_lora_rank = 512;
  c.qk_nope_head_dim = 128;
  c.qk_rope_head_dim = 64;
  c.v_head_dim = 128;
  c.rope_scaling = {.factor = 40, .mscale = 0.707, .mscale_all_dim = 0.707};
  c.max_position_embeddings = 163840;
  return c;
}

}  // namespace

Result<model::Config> bench_shape(const std::string& name) {
  if (name == "v2-lite") return v2_lite();
  ASSIGN_OR_RETURN(model::Config config, model::load_config(name));
  config.num_nextn_predict_layers = 0;
  return config;
}

Result<BenchForm> bench_form(const std::string& name) {
  using model::Dialect;
  using quant::Format;
  if (name == "bf16") return BenchForm{Dialect::kBf16, {}};
  if (name == "fp8_block")
    return BenchForm{Dialect::kFp8Block, {Format::kFp8Block, Format::kFp8Block}};
  if (name == "w8a8_int8") {
    return BenchForm{Dialect::kCompressedTensorsInt8, {Format::kW8A8Int8, Format::kW8A8Int8}};
  }
  if (name == "w4afp8") return BenchForm{Dialect::kW4Afp8, {Format::kW4Afp8, Format::kFp8Block}};
  return Status::usage(
      fmt::format("--format {} is unknown: take bf16, fp8_block, w4afp8 or w8a8_int8", name));
}

}  // namespace sortie::cli
