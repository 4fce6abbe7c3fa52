#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

// The largest magnitude of a unit (a row, a group, a block) decides its scale. Two cases have
// no useful scale, and every format and kernel treats them alike:
//   amax < 2^-100        the unit counts as zero: codes 0, scale 0. Above it, no scale and no
//                        quotient here is ever subnormal or overflows.
//   NaN or an infinity   codes 0, scale NaN: whatever the unit is multiplied with is NaN, so the
//                        fault shows instead of turning into a plausible number.
namespace sortie::quant {

constexpr float kZeroAmax = 0x1p-100f;
constexpr float kNanScale = std::numeric_limits<float>::quiet_NaN();

// Max of the magnitudes' bit patterns, in which infinity and then NaN come after every number; so
// an integer maximum of any width and in any order gives the same answer.
constexpr uint32_t kInfinityBits = 0x7f800000u;
inline uint32_t magnitude_bits(float x) { return std::bit_cast<uint32_t>(x) & 0x7fffffffu; }
inline float amax_from_bits(uint32_t bits) {
  return bits >= kInfinityBits ? kNanScale : std::bit_cast<float>(bits);
}
inline uint32_t amax_bits(const float* x, int64_t n) {
  uint32_t bits = 0;
  for (int64_t i = 0; i < n; ++i) bits = std::max(bits, magnitude_bits(x[i]));
  return bits;
}
// NaN if any value is NaN or infinite.
inline float amax(const float* x, int64_t n) { return amax_from_bits(amax_bits(x, n)); }

// amax / most, or 0 or NaN as above. A unit whose scale is not positive has codes 0.
inline float scale_from_amax(float amax, float most) { return amax < kZeroAmax ? 0 : amax / most; }

// Round half to even for |x| < 2^22, without a call: at 1.5 * 2^23 a float's spacing is 1.
inline float round_half_even(float x) {
  constexpr float kShift = 0x1.8p23f;
  return (x + kShift) - kShift;
}

}  // namespace sortie::quant
