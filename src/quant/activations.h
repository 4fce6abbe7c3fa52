#pragma once

#include <cstdint>

#include "base/scalar.h"
#include "quant/amax.h"
#include "quant/matrix.h"

// Activations: one fp32 row to a packed row and back. This scalar form is the definition that
// backends are tested against, byte for byte.
//
//   kE4m3Static     q = e4m3(x / s), s given            (NaN gives NaN, an infinity +-448)
//   kE4m3Token      s = amax / 448 over the row,        q = e4m3(x / s)
//   kE4m3Group128   s = amax / 448 over 128 channels (the last group may be short),
//                   with ue8m0 rounded up to a power of two; q = e4m3(x / s)
//   kInt8Token      s = amax / 127 over the row,        q = rne(x * (127 / amax))
//   kInt8Static     s and an offset z given,            q = clamp(rne(x / s + z), -128, 127)
//
// e4m3() rounds half to even and saturates at 448; a negative that rounds to zero keeps its sign.
// Divisions are IEEE. Tiny, NaN and infinite units: see amax.h.
//
//   row:  | codes, k bytes | 0..3 | fp32 scales: 0, 1 or ceil(k/128) | up to a multiple of 64 |
//
// The bytes between are padding: never read, left as they are.
namespace sortie::quant {

// The smallest power of two that is not below s; s is 0, NaN or normal.
inline float round_up_to_power_of_two(float s) {
  const uint32_t bits = std::bit_cast<uint32_t>(s);
  if (!(s > 0) || (bits & 0x7fffffu) == 0) return s;
  return std::bit_cast<float>((bits & 0x7f800000u) + 0x800000u);
}

inline float e4m3_scale(float amax, bool ue8m0 = false) {
  const float s = scale_from_amax(amax, kE4m3Max);
  return ue8m0 ? round_up_to_power_of_two(s) : s;
}

inline float int8_scale(float amax) { return scale_from_amax(amax, 127.0f); }
// What x is multiplied with: 127 / amax, or 0 where the codes are 0.
inline float int8_multiplier(float amax) { return amax >= kZeroAmax ? 127.0f / amax : 0.0f; }
// |x| <= amax, so the product is at most 127 and a rounding error: no clamp is needed.
inline int8_t int8_code(float x, float multiplier) {
  return static_cast<int8_t>(round_half_even(x * multiplier));
}

// Asymmetric and static: `offset` is the code of 0, in -128..127. Clamped before it is rounded, so
// that no quotient leaves round_half_even's range.
inline int8_t int8_static_code(float x, float scale, float offset) {
  return static_cast<int8_t>(round_half_even(std::clamp(x / scale + offset, -128.0f, 127.0f)));
}

// Quantises x [out.k] into row i of out; kF32 copies. The static formats need
// out.static_scale > 0.
void quantise_row(const float* x, const Rows& out, int64_t i);

// code * scale in fp32.
void dequantise_row(const Rows& rows, int64_t i, float* out);

}  // namespace sortie::quant
