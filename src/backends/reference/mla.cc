#include <algorithm>
#include <cmath>

#include "backends/reference/reference.h"
#include "quant/matrix_ops.h"

namespace sortie::reference {

namespace {

// Attention of one head of one row, absorbed (DeepSeek-V2, arXiv 2405.04434, section 2.1.2): the
// query moves into the latent space, keys and values are the cached latents themselves.
void head(const ops::Mla& a, int64_t t, int h, const float* w_kv_b, const ops::Context& c) {
  Arena::Scope scope(c.scratch);
  const float* w_uk = w_kv_b + h * (a.nope + a.v_dim) * a.lora;
  const float* w_uv = w_uk + a.nope * a.lora;
  const float* q = a.q + (t * a.heads + h) * (a.nope + a.rope_dim);
  const int64_t keys = int64_t{a.positions[t]} + 1;

  auto* q_latent = c.scratch.alloc<double>(a.lora);
  for (int64_t l = 0; l < a.lora; ++l) q_latent[l] = 0;
  for (int64_t d = 0; d < a.nope; ++d) {
    for (int64_t l = 0; l < a.lora; ++l)
      q_latent[l] += static_cast<double>(q[d]) * w_uk[d * a.lora + l];
  }

  auto* latent = c.scratch.alloc<float>(a.cache.width);
  const auto load = [&](int64_t key) {
    const std::byte* row =
        a.cache.row(a.page_tables[t][key / a.cache.page_size], key % a.cache.page_size);
    quant::dequantise_row({.format = a.cache.format, .k = a.cache.width, .codes = row}, 0, latent);
  };
  auto* p = c.scratch.alloc<double>(keys);
  double largest = -INFINITY;
  for (int64_t key = 0; key < keys; ++key) {
    load(key);
    double score = 0;
    for (int64_t l = 0; l < a.lora; ++l) score += q_latent[l] * latent[l];
    for (int64_t r = 0; r < a.rope_dim; ++r) {
      score += static_cast<double>(q[a.nope + r]) * latent[a.lora + r];
    }
    p[key] = score * a.scale;
    largest = std::max(largest, p[key]);
  }
  double total = 0;
  for (int64_t key = 0; key < keys; ++key) total += p[key] = std::exp(p[key] - largest);

  auto* context = c.scratch.alloc<double>(a.lora);
  for (int64_t l = 0; l < a.lora; ++l) context[l] = 0;
  for (int64_t key = 0; key < keys; ++key) {
    load(key);
    for (int64_t l = 0; l < a.lora; ++l) context[l] += p[key] / total * latent[l];
  }
  float* out = a.out + (t * a.heads + h) * a.v_dim;
  for (int64_t v = 0; v < a.v_dim; ++v) {
    double sum = 0;
    for (int64_t l = 0; l < a.lora; ++l) sum += context[l] * w_uv[v * a.lora + l];
    out[v] = static_cast<float>(sum);
  }
}

}  // namespace

void mla(const ops::Mla& a, const ops::Context& c) {
  Arena::Scope scope(c.scratch);
  auto* w_kv_b = c.scratch.alloc<float>(a.w_kv_b.n * a.w_kv_b.k);
  for (int64_t n = 0; n < a.w_kv_b.n; ++n)
    quant::dequantise_row(a.w_kv_b, n, w_kv_b + n * a.w_kv_b.k);
  for (int64_t t = 0; t < a.tokens; ++t) {
    for (int h = 0; h < a.heads; ++h) head(a, t, h, w_kv_b, c);
  }
}

}  // namespace sortie::reference
