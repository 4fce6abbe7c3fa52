#include <cmath>

#include "backends/reference/reference.h"
#include "quant/activations.h"

namespace sortie::reference {

void swiglu_quantise(const ops::SwigluQuantise& a, const ops::Context& c) {
  Arena::Scope scope(c.scratch);
  auto* h = c.scratch.alloc<float>(a.n);
  const bool plain = a.out.format == quant::ActFormat::kF32;
  for (int64_t t = 0; t < a.rows; ++t) {
    const float* gate = a.gate_up + t * 2 * a.n;
    const float* up = gate + a.n;
    float* out = plain ? a.out.f32(t) : h;
    for (int64_t i = 0; i < a.n; ++i) {
      out[i] =
          static_cast<float>(gate[i] / (1.0 + std::exp(-static_cast<double>(gate[i]))) * up[i]);
    }
    if (!plain) quant::quantise_row(h, a.out, t);
  }
}

}  // namespace sortie::reference
