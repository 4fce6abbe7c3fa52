#include "backends/reference/reference.h"

namespace sortie::reference {

void rope(const ops::Rope& a, const ops::Context& /*context*/) {
  for (int64_t t = 0; t < a.tokens; ++t) {
    const float* cos_sin = a.cos_sin + int64_t{a.positions[t]} * a.dim;
    for (int64_t h = 0; h < a.heads; ++h) {
      float* x = a.x + (t * a.heads + h) * a.head_stride + a.offset;
      for (int64_t i = 0; i < a.dim; i += 2) {
        const float c = cos_sin[i];
        const float s = cos_sin[i + 1];
        const float even = x[i];
        const float odd = x[i + 1];
        x[i] = even * c - odd * s;
        x[i + 1] = odd * c + even * s;
      }
    }
  }
}

}  // namespace sortie::reference
