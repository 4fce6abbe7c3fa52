#include <cmath>

#include "backends/reference/reference.h"
#include "quant/activations.h"

namespace sortie::reference {

namespace {

// One row: y = x / sqrt(mean(x^2) + eps) * weight (+ bias), to `out` and, quantised, to row t of
// `rows`.
void norm_row(const float* x, const ops::NormWeight& norm, float* out, const ops::Rows& rows,
              int64_t t, const ops::Context& c) {
  Arena::Scope scope(c.scratch);
  float* y = out != nullptr ? out : c.scratch.alloc<float>(norm.n);
  double squares = 0;
  for (int64_t i = 0; i < norm.n; ++i) squares += static_cast<double>(x[i]) * x[i];
  const double scale = 1.0 / std::sqrt(squares / static_cast<double>(norm.n) + norm.eps);
  for (int64_t i = 0; i < norm.n; ++i) {
    y[i] = static_cast<float>(x[i] * scale * static_cast<double>(norm.weight[i]));
    if (norm.bias != nullptr) y[i] += norm.bias[i];
  }
  if (rows.data != nullptr) quant::quantise_row(y, rows, t);
}

}  // namespace

void rms_norm(const ops::RmsNorm& a, const ops::Context& c) {
  for (int64_t t = 0; t < a.tokens; ++t) {
    const int64_t stride = a.out_stride > 0 ? a.out_stride : a.norm.n;
    norm_row(a.x + t * a.x_stride, a.norm, a.out == nullptr ? nullptr : a.out + t * stride,
             a.quantised, t, c);
  }
}

void add_rms_norm(const ops::AddRmsNorm& a, const ops::Context& c) {
  const int64_t n = a.norm.n;
  for (int64_t t = 0; t < a.tokens; ++t) {
    float* residual = a.residual + t * n;
    for (int64_t i = 0; i < n; ++i) {
      residual[i] = a.starts ? a.x[t * n + i] : residual[i] + a.x[t * n + i];
    }
    norm_row(residual, a.norm, a.out == nullptr ? nullptr : a.out + t * n, a.quantised, t, c);
  }
}

}  // namespace sortie::reference
