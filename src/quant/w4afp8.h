#pragma once

#include <cstdint>

#include "base/scalar.h"
#include "quant/matrix.h"

// w4afp8: signed int4 weights in groups of 128 along K, for e4m3 activations; the form that
// TensorRT-LLM's mixed-precision MoE script writes and SGLang loads as "w4afp8".
//
//   a row:    byte j =  | q[2j+1] : 4 | q[2j] : 4 |      two's complement, -8..7
//             bytes 0..63 are group 0, 64..127 group 1, ...; the last group may be short, and the
//             high nibble that an odd k leaves over is 0
//   codes     [n, ceil(k/2)] bytes, row-major, no shuffle
//   scales    [n, ceil(k/128)]: fp32 in the file, rounded to bf16 in memory; w = q * scale
//
// Bytes in memory: n * ceil(k/2) + 2 * n * ceil(k/128).
// Scale: amax / 7 of the group in fp32; q = clamp(rne(w / scale), -8, 7) with the fp32 scale (-8
// cannot arise from it, but is read). An fp8 source is dequantised and rounded to bf16 first. Tiny,
// NaN, infinite: amax.h.
namespace sortie::quant::w4afp8 {

constexpr int64_t row_bytes(int64_t k) { return ceil_div(k, 2); }
constexpr int64_t scale_count(int64_t n, int64_t k) { return n * ceil_div(k, kGroup); }
constexpr int64_t byte_size(int64_t n, int64_t k) {
  return n * row_bytes(k) + 2 * scale_count(n, k);
}

inline int code_at(const uint8_t* row, int64_t column) {
  const uint8_t byte = row[column / 2];
  return column % 2 == 0 ? int4_low(byte) : int4_high(byte);
}

// w [n, k] -> codes [n, ceil(k/2)], scales [n, ceil(k/128)] as a file has them.
void quantise(const float* w, int64_t n, int64_t k, uint8_t* codes, float* scales);

// The same with the scale of each group that leaves the least squared error, among bf16 values from
// amax / 7 down to 0.6 of it; the largest of equal ones.
void quantise_by_search(const float* w, int64_t n, int64_t k, uint8_t* codes, float* scales);

// One row: `codes` [ceil(k/2)] and `scales` [ceil(k/128)] are the row's, as in memory.
void dequantise_row(const uint8_t* codes, const bf16* scales, int64_t k, float* out);

}  // namespace sortie::quant::w4afp8
