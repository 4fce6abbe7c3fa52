#include "backends/reference/dot.h"
#include "backends/reference/reference.h"

namespace sortie::reference {

void grouped_gemm(const ops::GroupedGemm& a, const ops::Context& c) {
  if (a.local_experts == 0) return;
  const int64_t n = a.w[0].n;
  Arena::Scope scope(c.scratch);
  auto* x = c.scratch.alloc<float>(a.x.k);
  auto* w = c.scratch.alloc<float>(n * a.x.k);
  for (int e = 0; e < a.local_experts; ++e) {
    if (a.offsets[e] == a.offsets[e + 1]) continue;
    for (int part = 0; part < a.parts; ++part) {
      const ops::Matrix& m = a.w[e * a.parts + part];
      CHECK(a.x.k == m.k && fits(a.x, m));
      for (int64_t j = 0; j < n; ++j) weight_codes(m, j, w + j * m.k);
      for (int32_t i = a.offsets[e]; i < a.offsets[e + 1]; ++i) {
        const int64_t t = a.row_index == nullptr ? i : a.row_index[i];
        activation_codes(a.x, t, x);
        float* out = a.out + (int64_t{i} * a.parts + part) * n;
        for (int64_t j = 0; j < n; ++j) out[j] = dot(m, j, w + j * m.k, a.x, t, x);
      }
    }
  }
}

}  // namespace sortie::reference
