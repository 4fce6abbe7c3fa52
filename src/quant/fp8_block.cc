#include "quant/fp8_block.h"

#include <algorithm>

#include "quant/amax.h"

namespace sortie::quant::fp8_block {
namespace {

// A block of at most 128 x 128, k being the distance of its rows.
void quantise_block(const float* w, int64_t rows, int64_t columns, int64_t k, uint8_t* codes,
                    float* scale) {
  uint32_t bits = 0;
  for (int64_t r = 0; r < rows; ++r) bits = std::max(bits, amax_bits(w + r * k, columns));
  *scale = scale_from_amax(amax_from_bits(bits), kE4m3Max);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      codes[r * k + c] = *scale > 0 ? weight_code(w[r * k + c], *scale) : uint8_t{0};
    }
  }
}

}  // namespace

void quantise(const float* w, int64_t n, int64_t k, uint8_t* codes, float* scales) {
  for (int64_t r = 0; r < n; r += kGroup) {
    for (int64_t c = 0; c < k; c += kGroup) {
      quantise_block(w + r * k + c, std::min(kGroup, n - r), std::min(kGroup, k - c), k,
                     codes + r * k + c, scales++);
    }
  }
}

void dequantise_row(const uint8_t* codes, const float* scales, int64_t k, float* out) {
  for (int64_t c = 0; c < k; ++c) out[c] = to_float(e4m3{codes[c]}) * scales[c / kGroup];
}

}  // namespace sortie::quant::fp8_block
