#include "quant/w8a8_int8.h"

#include <algorithm>

#include "quant/amax.h"

namespace sortie::quant::w8a8_int8 {

void quantise(const float* w, int64_t n, int64_t k, int8_t* codes, bf16* scales) {
  for (int64_t r = 0; r < n; ++r, w += k, codes += k) {
    scales[r] = to_bf16(scale_from_amax(amax(w, k), 127.0f));
    const float scale = to_float(scales[r]);
    for (int64_t c = 0; c < k; ++c) {
      codes[c] =
          scale > 0
              ? static_cast<int8_t>(std::clamp(round_half_even(w[c] / scale), -127.0f, 127.0f))
              : int8_t{0};
    }
  }
}

void dequantise_row(const int8_t* codes, float scale, int64_t k, float* out) {
  for (int64_t c = 0; c < k; ++c) out[c] = static_cast<float>(codes[c]) * scale;
}

}  // namespace sortie::quant::w8a8_int8
