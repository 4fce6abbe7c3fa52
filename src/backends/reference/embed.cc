#include "backends/reference/dot.h"
#include "backends/reference/reference.h"

namespace sortie::reference {

void embed(const ops::Embed& a, const ops::Context& /*context*/) {
  for (int64_t t = 0; t < a.tokens; ++t) {
    CHECK(a.ids[t] >= 0 && a.ids[t] < a.table.n);
    weight_codes(a.table, a.ids[t], a.out + t * a.table.k);
  }
}

}  // namespace sortie::reference
