#include "model/plan.h"

#include <algorithm>

#include "base/saturate.h"
#include "quant/matrix_ops.h"

namespace sortie::model {

namespace {

using quant::Format;
using quant::Matrix;

// Parameters and bytes of a group of matrices.
struct Size {
  int64_t parameters = 0;
  int64_t bytes = 0;
  void add(Format format, int64_t n, int64_t k, int64_t count = 1) {
    const int64_t one = Matrix{.format = format, .n = n, .k = k}.bytes();
    parameters = saturating_add(parameters, saturating_product(count, n, k));
    bytes = saturating_add(bytes, saturating_product(count, one));
  }
  void add(const Size& other, int64_t count = 1) {
    parameters = saturating_add(parameters, saturating_product(count, other.parameters));
    bytes = saturating_add(bytes, saturating_product(count, other.bytes));
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
    dense.add(attention(c, f));
    if (c.is_moe_layer(layer)) {
      ++moe_layers;
      dense.add(Format::kBf16, c.n_routed_experts, c.hidden_size);
      dense.add(mlp(f.linears, c.hidden_size, c.moe_intermediate_size * c.n_shared_experts));
    } else {
      dense.add(mlp(f.linears, c.hidden_size, c.intermediate_size));
    }
  }
  Size embedding;
  embedding.add(Format::kBf16, c.vocab_size, c.hidden_size);
  Size experts;
  experts.add(expert, moe_layers * c.n_routed_experts);
  Size chosen;  // what one token meets: the head is read, the embedding table is not
  chosen.add(dense);
  chosen.add(embedding);
  chosen.add(expert, moe_layers * c.num_experts_per_tok);
  Size held = dense;
  held.add(embedding, c.tie_word_embeddings ? 1 : 2);

  plan.expert_bytes = experts.bytes;
  plan.dense_bytes = held.bytes;
  plan.parameters = saturating_add(held.parameters, experts.parameters);
  plan.active_parameters = chosen.parameters;
  plan.bytes_per_token = chosen.bytes;
  plan.cache_bytes_per_token =
      c.num_hidden_layers * c.latent_width() * quant::code_bytes(f.cache, 1, 1);
  return plan;
}

int64_t cache_bytes(const Config& c, const RankLoad& load) {
  return saturating_product(load.cache_layers, load.cache_tokens, c.latent_width(),
                            quant::code_bytes(load.cache_format, 1, 1));
}

// Follows deepseek.cc: what attention and the MLP or MoE of a layer allocate stays until the layer
// ends, and the widest layer counts. What is quantised is counted as fp32.
int64_t scratch_bytes(const Config& c, const RankLoad& load) {
  const int64_t heads = c.num_attention_heads;
  const int64_t h = c.hidden_size;
  const int64_t q = heads * c.qk_head_dim();
  const int64_t attention =
      h + 3 * c.q_lora_rank + q + c.latent_width() + 2 * heads * c.v_head_dim + h;
  const int64_t shared = c.moe_intermediate_size * c.n_shared_experts;
  const int64_t moe = 2 * c.num_experts_per_tok + 3 * shared + 3 * h +
                      c.num_experts_per_tok * (3 * c.moe_intermediate_size + h);
  const int64_t mlp = 3 * c.intermediate_size + 2 * h;
  bool any_moe = false;
  bool any_dense = false;
  for (int layer = 0; layer < c.num_hidden_layers; ++layer) {
    (c.is_moe_layer(layer) ? any_moe : any_dense) = true;
  }
  // Residual, delta, two norms, then the layer.
  const int64_t a_row =
      4 * h + attention + std::max(any_moe ? moe : int64_t{0}, any_dense ? mlp : int64_t{0});
  // A decode row's absorbed query, and the folded states of its segments.
  const int64_t segments = quant::ceil_div(load.context_length, load.decode_segment);
  const int64_t a_decode_row = saturating_add(
      c.vocab_size + h,
      saturating_product(heads, c.latent_width() + 2 + segments * (c.kv_lora_rank + 2)));
  const int64_t values =
      saturating_add(saturating_product(load.context_length, c.qk_rope_head_dim),
                     saturating_add(saturating_product(load.step_rows, a_row),
                                    saturating_product(load.decode_rows, a_decode_row)));
  return saturating_product(values, int64_t{sizeof(float)});
}

}  // namespace sortie::model
