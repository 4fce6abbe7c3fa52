#include "quant/w4afp8.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "quant/amax.h"

namespace sortie::quant::w4afp8 {
namespace {

int weight_code(float w, float scale) {
  return static_cast<int>(std::clamp(round_half_even(w / scale), -8.0f, 7.0f));
}

float nearest_scale(const float* w, int64_t count) { return scale_from_amax(amax(w, count), 7.0f); }

double squared_error(const float* w, int64_t count, float scale) {
  double error = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double d = double{w[i]} - static_cast<double>(weight_code(w[i], scale)) * scale;
    error += d * d;
  }
  return error;
}

float searched_scale(const float* w, int64_t count) {
  constexpr int kSteps = 20;
  const float widest = nearest_scale(w, count);
  if (!(widest > 0) || !std::isfinite(widest)) return widest;
  float best = widest;
  double least = std::numeric_limits<double>::infinity();
  for (int i = 0; i <= kSteps; ++i) {
    const float scale = round_to_bf16(widest * (1 - 0.02f * static_cast<float>(i)));
    if (!(scale > 0)) continue;
    const double error = squared_error(w, count, scale);
    if (error < least) {
      least = error;
      best = scale;
    }
  }
  return best;
}

// A group of at most 128 values.
void quantise_group(const float* w, int64_t count, float scale, uint8_t* codes) {
  for (int64_t i = 0; i < count; i += 2) {
    int low = 0;
    int high = 0;
    if (scale > 0) {
      low = weight_code(w[i], scale);
      if (i + 1 < count) high = weight_code(w[i + 1], scale);
    }
    codes[i / 2] = pack_int4(low, high);
  }
}

template <typename ScaleOf>
void quantise_groups(const float* w, int64_t n, int64_t k, uint8_t* codes, float* scales,
                     const ScaleOf& scale_of) {
  for (int64_t r = 0; r < n; ++r) {
    for (int64_t c = 0; c < k; c += kGroup) {
      const float* group = w + r * k + c;
      const int64_t count = std::min(kGroup, k - c);
      *scales = scale_of(group, count);
      quantise_group(group, count, *scales++, codes + r * row_bytes(k) + c / 2);
    }
  }
}

}  // namespace

void quantise(const float* w, int64_t n, int64_t k, uint8_t* codes, float* scales) {
  quantise_groups(w, n, k, codes, scales, nearest_scale);
}

void quantise_by_search(const float* w, int64_t n, int64_t k, uint8_t* codes, float* scales) {
  quantise_groups(w, n, k, codes, scales, searched_scale);
}

void dequantise_row(const uint8_t* codes, const bf16* scales, int64_t k, float* out) {
  for (int64_t c = 0; c < k; ++c) {
    out[c] = static_cast<float>(code_at(codes, c)) * to_float(scales[c / kGroup]);
  }
}

}  // namespace sortie::quant::w4afp8
