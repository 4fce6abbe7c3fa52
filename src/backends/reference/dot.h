#pragma once

#include "quant/matrix.h"

namespace sortie::reference {

// The codes of one weight row as floats, scales left out: out[k].
void weight_codes(const quant::Matrix& w, int64_t row, float* out);

// The codes of one activation row as floats, scales left out: out[k].
void activation_codes(const quant::Rows& x, int64_t row, float* out);

// One output of a linear, by the format's rule in docs/numerics.md. `w` and `x` are the codes of
// weight row `n` and activation row `t`.
float dot(const quant::Matrix& m, int64_t n, const float* w, const quant::Rows& rows, int64_t t,
          const float* x);

}  // namespace sortie::reference
