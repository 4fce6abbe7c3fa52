#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

// The scalar types that files and kernels hold. Conversions here are the definition that every
// faster form is tested against, all codes and all 65,536 bf16 values.
namespace sortie {

// bfloat16: the upper half of an IEEE binary32.
struct bf16 {
  uint16_t bits = 0;
};

inline float to_float(bf16 v) { return std::bit_cast<float>(static_cast<uint32_t>(v.bits) << 16); }

// Round half to even; NaN stays NaN (quiet, sign kept); overflow goes to infinity as IEEE says.
inline bf16 to_bf16(float f) {
  uint32_t u = std::bit_cast<uint32_t>(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((u >> 16) | 0x40u)};
  u += 0x7fffu + ((u >> 16) & 1u);
  return {static_cast<uint16_t>(u >> 16)};
}

inline float round_to_bf16(float f) { return to_float(to_bf16(f)); }

// IEEE binary16, which is only read: every value is exact in fp32.
struct fp16 {
  uint16_t bits = 0;
};

inline float to_float(fp16 v) {
  const uint32_t sign = static_cast<uint32_t>(v.bits & 0x8000u) << 16;
  const uint32_t exponent = (v.bits >> 10) & 31u;
  const uint32_t mantissa = v.bits & 0x3ffu;
  if (exponent == 0u) {  // subnormal: multiples of 2^-24
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  const uint32_t wide = exponent == 31u ? 255u : exponent + 112u;
  return std::bit_cast<float>(sign | (wide << 23) | (mantissa << 13));
}

// OCP FP8 E4M3 ("e4m3fn"): bias 7, no infinity, 0x7f and 0xff are NaN, largest 448, smallest
// subnormal 2^-9.
struct e4m3 {
  uint8_t bits = 0;
};
constexpr float kE4m3Max = 448.0f;

inline float to_float(e4m3 v) {
  const uint32_t sign = static_cast<uint32_t>(v.bits & 0x80u) << 24;
  const uint32_t exponent = (v.bits >> 3) & 15u;
  const uint32_t mantissa = v.bits & 7u;
  if (exponent == 15u && mantissa == 7u) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (exponent == 0u) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-9f;
    return sign != 0 ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 120u) << 23) | (mantissa << 20));
}

// Round half to even, saturating: anything past 448, infinities included, becomes +-448. NaN
// becomes NaN (0x7f with the sign).
inline e4m3 to_e4m3(float f) {
  const uint32_t u = std::bit_cast<uint32_t>(f);
  const uint8_t sign = static_cast<uint8_t>((u >> 24) & 0x80u);
  const float magnitude = std::bit_cast<float>(u & 0x7fffffffu);
  if (std::isnan(f)) return {static_cast<uint8_t>(sign | 0x7fu)};
  if (magnitude >= kE4m3Max) return {static_cast<uint8_t>(sign | 0x7eu)};
  if (magnitude < 0x1p-6f) {  // subnormal: multiples of 2^-9, and 8 of them are the first normal
    const auto code = static_cast<uint8_t>(std::nearbyint(magnitude * 0x1p9f));
    return {static_cast<uint8_t>(sign | code)};
  }
  uint32_t m = u & 0x7fffffffu;
  m += 0x7ffffu + ((m >> 20) & 1u);
  m = (m >> 20) - (120u << 3);
  return {static_cast<uint8_t>(sign | (m > 0x7eu ? 0x7eu : m))};
}

// Two signed int4 of a byte: K index 2j in the low nibble, 2j+1 in the high one.
inline int int4_low(uint8_t byte) {
  return static_cast<int8_t>(static_cast<uint8_t>(byte << 4)) >> 4;
}
inline int int4_high(uint8_t byte) { return static_cast<int8_t>(byte) >> 4; }
inline uint8_t pack_int4(int low, int high) {
  return static_cast<uint8_t>((low & 0xf) | ((high & 0xf) << 4));
}

// Unaligned loads, for bytes that come from files.
template <typename T>
T load_unaligned(const void* p) {
  T v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

}  // namespace sortie
