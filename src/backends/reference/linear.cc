#include "backends/reference/dot.h"
#include "backends/reference/reference.h"

namespace sortie::reference {

void linear(const ops::Linear& a, const ops::Context& c) {
  CHECK(a.x.k == a.w.k && fits(a.x, a.w));
  Arena::Scope scope(c.scratch);
  auto* x = c.scratch.alloc<float>(a.x.count * a.x.k);
  auto* w = c.scratch.alloc<float>(a.w.k);
  for (int64_t t = 0; t < a.x.count; ++t) activation_codes(a.x, t, x + t * a.x.k);
  for (int64_t n = 0; n < a.w.n; ++n) {
    weight_codes(a.w, n, w);
    for (int64_t t = 0; t < a.x.count; ++t) {
      const float y = dot(a.w, n, w, a.x, t, x + t * a.x.k);
      a.y[t * a.y_stride + n] = a.bias == nullptr ? y : y + a.bias[n];
    }
  }
}

}  // namespace sortie::reference
