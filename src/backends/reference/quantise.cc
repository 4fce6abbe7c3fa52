#include "backends/reference/reference.h"
#include "quant/activations.h"

namespace sortie::reference {

void quantise(const ops::Quantise& a, const ops::Context& /*context*/) {
  for (int64_t t = 0; t < a.out.count; ++t) quant::quantise_row(a.x + t * a.x_stride, a.out, t);
}

}  // namespace sortie::reference
