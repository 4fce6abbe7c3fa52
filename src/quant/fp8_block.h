#pragma once

#include <cstdint>

#include "base/scalar.h"
#include "quant/matrix.h"

// fp8_block: the form of the official V3 and R1 checkpoints ("quant_method": "fp8").
//
//            k = 0 .. 127   128 .. 255   256 ..
//          +--------------+------------+-----
//   n 0    |  s[0][0]     |  s[0][1]   |          codes   e4m3 [n, k], row-major
//   ..127  |              |            |          scales  float [ceil(n/128), ceil(k/128)]
//          +--------------+------------+-----     w = code * scale of its block
//   n 128  |  s[1][0]     |  s[1][1]   |          ("weight_scale_inv" is multiplied, despite its
//   name)
//    ..    |              |            |
//
// The last block of a row or column may be short. Bytes: n*k + 4 * ceil(n/128) * ceil(k/128).
// Scale: amax / 448 of the block, fp32; code: e4m3(w / scale), saturating. A value that rounds to
// zero is stored as +0 (0x00), as published files have it. Tiny, NaN, infinite: amax.h.
namespace sortie::quant::fp8_block {

constexpr int64_t scale_count(int64_t n, int64_t k) {
  return ceil_div(n, kGroup) * ceil_div(k, kGroup);
}
constexpr int64_t byte_size(int64_t n, int64_t k) { return n * k + 4 * scale_count(n, k); }

// The scales of the blocks that `row` crosses, [ceil(k/128)].
inline const float* row_scales(const float* scales, int64_t k, int64_t row) {
  return scales + row / kGroup * ceil_div(k, kGroup);
}

inline uint8_t weight_code(float w, float scale) {
  const uint8_t code = to_e4m3(w / scale).bits;
  return code == 0x80 ? 0 : code;
}

// w [n, k] -> codes [n, k], scales [ceil(n/128), ceil(k/128)]. A band of 128 rows is a matrix of
// its own, so a large one can be handed in pieces.
void quantise(const float* w, int64_t n, int64_t k, uint8_t* codes, float* scales);

// One row: `codes` [k] is the row's, `scales` as row_scales gives them.
void dequantise_row(const uint8_t* codes, const float* scales, int64_t k, float* out);

}  // namespace sortie::quant::fp8_block
