#pragma once

#include "quant/matrix.h"

namespace sortie::reference {

// The codes of one weight row as floats, scales left out: out[k].
void weight_codes(const quant::Matrix& w, int64_t row, float* out);

// The codes of one activation row as floats, scales left out: out[k].
void activation_codes(const quant::Rows& x, int64_t row, float* out);

// Whether the rows are in a form that the matrix takes: its own, or for a plain one any plain form,
// so that GPUs are judged on the very bf16 rows that they get.
inline bool fits(const quant::Rows& x, const quant::Matrix& w) {
  const quant::ActFormat wanted = quant::act_format(w);
  return x.format == wanted || (wanted == quant::ActFormat::kF32 && x.plain());
}

// One output of a linear, by the format's rule in docs/numerics.md. `w` and `x` are the codes of
// weight row `n` and activation row `t`.
float dot(const quant::Matrix& m, int64_t n, const float* w, const quant::Rows& rows, int64_t t,
          const float* x);

}  // namespace sortie::reference
