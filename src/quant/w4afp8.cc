#include "quant/w4afp8.h"

#include <algorithm>

#include "quant/amax.h"

namespace sortie::quant::w4afp8 {
namespace {

int weight_code(float w, float scale) {
  return static_cast<int>(std::clamp(round_half_even(w / scale), -8.0f, 7.0f));
}

// A group of at most 128 values.
void quantise_group(const float* w, int64_t count, uint8_t* codes, float* scale) {
  *scale = scale_from_amax(amax(w, count), 7.0f);
  for (int64_t i = 0; i < count; i += 2) {
    int low = 0;
    int high = 0;
    if (*scale > 0) {
      low = weight_code(w[i], *scale);
      if (i + 1 < count) high = weight_code(w[i + 1], *scale);
    }
    codes[i / 2] = pack_int4(low, high);
  }
}

}  // namespace

void quantise(const float* w, int64_t n, int64_t k, uint8_t* codes, float* scales) {
  for (int64_t r = 0; r < n; ++r) {
    for (int64_t c = 0; c < k; c += kGroup) {
      quantise_group(w + r * k + c, std::min(kGroup, k - c), codes + r * row_bytes(k) + c / 2,
                     scales++);
    }
  }
}

void dequantise_row(const uint8_t* codes, const bf16* scales, int64_t k, float* out) {
  for (int64_t c = 0; c < k; ++c) {
    out[c] = static_cast<float>(code_at(codes, c)) * to_float(scales[c / kGroup]);
  }
}

}  // namespace sortie::quant::w4afp8
