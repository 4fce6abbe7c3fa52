#pragma once

#include <cstdint>

#include "base/scalar.h"
#include "quant/matrix.h"

// w8a8_int8: int8 weights with one scale an output channel, for int8 activations with one scale a
// token; compressed-tensors' "int-quantized" form with strategy "channel", symmetric.
//
//   codes    int8 [n, k], row-major, -127..127
//   scales   [n]: bf16 [n, 1] in the files written here, widened to fp32 in memory; w = q * scale
//
// Bytes in memory: n*k + 4*n.
// Scale: amax / 127 of the row in fp32, rounded to bf16; q = clamp(rne(w / scale), -127, 127) with
// the scale as stored. Tiny, NaN, infinite: amax.h.
namespace sortie::quant::w8a8_int8 {

constexpr int64_t byte_size(int64_t n, int64_t k) { return n * k + 4 * n; }

// w [n, k] -> codes [n, k], scales [n] as a file has them.
void quantise(const float* w, int64_t n, int64_t k, int8_t* codes, bf16* scales);

// One row.
void dequantise_row(const int8_t* codes, float scale, int64_t k, float* out);

}  // namespace sortie::quant::w8a8_int8
