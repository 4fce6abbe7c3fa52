#include "backends/reference/reference.h"
#include "quant/matrix_ops.h"

namespace sortie::reference {

void kv_append(const ops::KvAppend& a, const ops::Context& c) {
  for (int64_t t = 0; t < a.tokens; ++t) {
    const float* kv = a.kv + t * a.kv_stride;
    const int64_t position = a.positions[t];
    Arena::Scope scope(c.scratch);
    auto* row = c.scratch.alloc<float>(a.cache.width);
    rms_norm({.x = kv, .tokens = 1, .x_stride = a.kv_stride, .norm = a.norm, .out = row}, c);
    float* key = row + a.norm.n;
    for (int64_t i = 0; i < a.rope_dim; ++i) key[i] = kv[a.norm.n + i];
    rope({.x = key,
          .tokens = 1,
          .heads = 1,
          .head_stride = a.rope_dim,
          .offset = 0,
          .dim = a.rope_dim,
          .positions = a.positions + t,
          .cos_sin = a.cos_sin},
         c);
    quant::store_plain_row(
        a.cache.format, row, a.cache.width,
        a.cache.row(a.page_tables[t][position / a.cache.page_size], position % a.cache.page_size));
  }
}

}  // namespace sortie::reference
