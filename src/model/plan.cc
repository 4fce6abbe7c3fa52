#include "model/plan.h"

namespace sortie::model {

namespace {

using quant::Format;
using quant::Matrix;

// Parameters and bytes of a group of matrices.
struct Size {
  int64_t parameters = 0;
  int64_t bytes = 0;
  void add(Format format, int64_t n, int64_t k, int64_t count = 1) {
    parameters += count * n * k;
    bytes += count * Matrix{.format = format, .n = n, .k = k}.bytes();
  }
};

Size attention(const Config& c, const Formats& f) {
  Size s;
  const int64_t heads = c.num_attention_heads;
  if (c.q_lora_rank > 0) {
    s.add(f.linears, c.q_lora_rank, c.hidden_size);
    s.add(f.linears, heads * c.qk_head_dim(), c.q_lora_rank);
  } else {
    s.add(f.linears, heads * c.qk_head_dim(), c.hidden_size);
  }
  s.add(f.linears, c.latent_width(), c.hidden_size);
  // As the file has it: w8a8 written here leaves it in bf16.
  s.add(f.linears == Format::kFp8Block ? Format::kFp8Block : Format::kBf16,
        heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank);
  s.add(f.linears, c.hidden_size, heads * c.v_head_dim);
  return s;
}

Size mlp(Format format, int64_t hidden, int64_t inner, int64_t count = 1) {
  Size s;
  s.add(format, inner, hidden, 2 * count);
  s.add(format, hidden, inner, count);
  return s;
}

}  // namespace

MemoryPlan memory_plan(const Config& c, const Formats& f) {
  MemoryPlan plan;
  Size dense;
  const Size expert = mlp(f.experts, c.hidden_size, c.moe_intermediate_size);
  int64_t moe_layers = 0;
  for (int layer = 0; layer < c.num_hidden_layers; ++layer) {
    const Size a = attention(c, f);
    Size rest;
    if (c.is_moe_layer(layer)) {
      ++moe_layers;
      rest.add(Format::kBf16, c.n_routed_experts, c.hidden_size);
      const Size shared =
          mlp(f.linears, c.hidden_size, c.moe_intermediate_size * c.n_shared_experts);
      rest.parameters += shared.parameters;
      rest.bytes += shared.bytes;
    } else {
      rest = mlp(f.linears, c.hidden_size, c.intermediate_size);
    }
    dense.parameters += a.parameters + rest.parameters;
    dense.bytes += a.bytes + rest.bytes;
  }
  Size embedding;
  embedding.add(Format::kBf16, c.vocab_size, c.hidden_size);
  const Size head = embedding;
  const int64_t stored_heads = c.tie_word_embeddings ? 0 : 1;

  plan.expert_bytes = moe_layers * c.n_routed_experts * expert.bytes;
  plan.dense_bytes = dense.bytes + embedding.bytes + stored_heads * head.bytes;
  plan.parameters = dense.parameters + embedding.parameters + stored_heads * head.parameters +
                    moe_layers * c.n_routed_experts * expert.parameters;
  plan.active_parameters =
      dense.parameters + head.parameters + moe_layers * c.num_experts_per_tok * expert.parameters;
  plan.bytes_per_token =
      dense.bytes + head.bytes + moe_layers * c.num_experts_per_tok * expert.bytes;
  plan.cache_bytes_per_token = c.num_hidden_layers * c.latent_width() * int64_t{sizeof(float)};
  return plan;
}

}  // namespace sortie::model
