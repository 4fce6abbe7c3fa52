#pragma once

#include <immintrin.h>

#include <cstdint>

// AVX-512 F, BW, VL and DQ under the names that simd_rows.h and simd_gemm.h are written in. `left`
// is how many lanes there are, any number; those past it are read as zero and never touched.
namespace sortie::cpu {
namespace {

struct Simd {
  using F = __m512;
  using I = __m512i;
  static constexpr int kWidth = 16;  // fp32 lanes
  static constexpr int kBytes = 64;
  static constexpr int kRegisters = 32;
  // Rows of a 4-column tile: as many sums as leave registers for the operands.
  static constexpr int kRowsF32 = 6;
  static constexpr int kRowsInt4 = 3;
  static constexpr int kRowsInt8 = 4;

  static __mmask16 lanes_below(int64_t left) {
    if (left <= 0) return 0;
    return static_cast<__mmask16>(left >= kWidth ? 0xffff : (1U << left) - 1U);
  }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static F load(const float* p, int64_t left) {
    return left >= kWidth ? load(p) : _mm512_maskz_loadu_ps(lanes_below(left), p);
  }
  static void store(float* p, F v) { _mm512_storeu_ps(p, v); }
  static void store(float* p, F v, int64_t left) {
    if (left >= kWidth) {
      store(p, v);
    } else {
      _mm512_mask_storeu_ps(p, lanes_below(left), v);
    }
  }
  static F keep(F v, int64_t left, F rest) {
    return _mm512_mask_mov_ps(rest, lanes_below(left), v);
  }

  static F zero() { return _mm512_setzero_ps(); }
  static F set(float x) { return _mm512_set1_ps(x); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }  // b if one is NaN
  static F max(F a, F b) { return _mm512_max_ps(a, b); }  // b if one is NaN
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F negate(F a) { return _mm512_xor_ps(a, set(-0.0f)); }
  static F round(F a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static F scale_by_power(F v, F n) { return _mm512_scalef_ps(v, n); }

  static I zero_bits() { return _mm512_setzero_si512(); }
  static I set32(int x) { return _mm512_set1_epi32(x); }
  static I set8(int x) { return _mm512_set1_epi8(static_cast<char>(x)); }
  static I bits(F v) { return _mm512_castps_si512(v); }
  static F floats(I v) { return _mm512_castsi512_ps(v); }
  static I load_bits(const void* p) { return _mm512_loadu_si512(p); }
  static void store_bits(void* p, I v) { _mm512_storeu_si512(p, v); }
  static I bit_and(I a, I b) { return _mm512_and_si512(a, b); }
  static I bit_or(I a, I b) { return _mm512_or_si512(a, b); }
  static I bit_xor(I a, I b) { return _mm512_xor_si512(a, b); }
  static I add8(I a, I b) { return _mm512_add_epi8(a, b); }
  static I add16(I a, I b) { return _mm512_add_epi16(a, b); }
  static I add32(I a, I b) { return _mm512_add_epi32(a, b); }
  static I sub32(I a, I b) { return _mm512_sub_epi32(a, b); }
  static I min32(I a, I b) { return _mm512_min_epi32(a, b); }
  static I max32(I a, I b) { return _mm512_max_epi32(a, b); }
  static I max_u8(I a, I b) { return _mm512_max_epu8(a, b); }
  template <int kN>
  static I right32(I a) {
    return _mm512_srli_epi32(a, kN);
  }
  template <int kN>
  static I left32(I a) {
    return _mm512_slli_epi32(a, kN);
  }
  template <int kN>
  static I right16(I a) {
    return _mm512_srli_epi16(a, kN);
  }
  static I where_greater(I a, I b, I yes, I no) {
    return _mm512_mask_mov_epi32(no, _mm512_cmpgt_epi32_mask(a, b), yes);
  }
  static bool any_byte_is(I v, int byte) { return _mm512_cmpeq_epi8_mask(v, set8(byte)) != 0; }
  static I to_int(F v) { return _mm512_cvtps_epi32(v); }
  static F to_float(I v) { return _mm512_cvtepi32_ps(v); }
  // Pairs of neighbours: unsigned a times signed b to saturated 16 bits, and 16 bits to 32.
  static I dot_u8_s8(I a, I b) { return _mm512_maddubs_epi16(a, b); }
  static I dot_16(I a, I b) { return _mm512_madd_epi16(a, b); }

  static I widen_s8(const void* p) {  // kBytes / 2 codes to 16 bits
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
  }
  static F widen_bf16(const uint16_t* p) {  // kWidth values
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return floats(left32<16>(_mm512_cvtepu16_epi32(v)));
  }
  static F widen_half(I v, int part) {  // part 0 or 1 of 2 * kWidth halves
    return _mm512_cvtph_ps(part == 0 ? _mm512_castsi512_si256(v) : _mm512_extracti64x4_epi64(v, 1));
  }
  static I left_7_words(I v) { return _mm512_slli_epi16(v, 7); }
  // kWidth lanes to bytes, saturated.
  static void store_bytes(void* p, I v, bool is_signed, int64_t left) {
    const __m128i bytes = is_signed ? _mm512_cvtsepi32_epi8(v) : _mm512_cvtusepi32_epi8(v);
    _mm_mask_storeu_epi8(p, lanes_below(left), bytes);
  }

  // Halves folded to 128 bits.
  static __m128 half_sum(F v) {
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  }
  static __m128i half_sum(I v) {
    const __m256i half =
        _mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  }
  static float largest(F v) { return _mm512_reduce_max_ps(v); }
  static uint32_t largest(I v) { return _mm512_reduce_max_epu32(v); }
  // Within each 128 bits, the sums of neighbours' lanes: 4 vectors to one.
  static F fold4(F a, F b, F c, F d) {
    const F ab = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const F cd = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    return add(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  }
  static I fold4(I a, I b, I c, I d) {
    const I ab = add32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const I cd = add32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    return add32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  }
};

}  // namespace
}  // namespace sortie::cpu
