#pragma once

#include <immintrin.h>

#include <cstdint>

// AVX2, FMA and F16C under the names that simd_rows.h and simd_gemm.h are written in. `left` is how
// many lanes there are, any number; those past it are read as zero and never touched.
namespace sortie::cpu {
namespace {

struct Simd {
  using F = __m256;
  using I = __m256i;
  static constexpr int kWidth = 8;  // fp32 lanes
  static constexpr int kBytes = 32;
  static constexpr int kRegisters = 16;
  // Rows of a 4-column tile: as many sums as leave registers for the operands.
  static constexpr int kRowsF32 = 3;
  static constexpr int kRowsInt4 = 2;
  static constexpr int kRowsInt8 = 2;

  static I lanes_below(int64_t left) {
    const int count = left <= 0 ? 0 : (left >= kWidth ? kWidth : static_cast<int>(left));
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static F load(const float* p, int64_t left) {
    return left >= kWidth ? load(p) : _mm256_maskload_ps(p, lanes_below(left));
  }
  static void store(float* p, F v) { _mm256_storeu_ps(p, v); }
  static void store(float* p, F v, int64_t left) {
    if (left >= kWidth) {
      store(p, v);
    } else {
      _mm256_maskstore_ps(p, lanes_below(left), v);
    }
  }
  static F keep(F v, int64_t left, F rest) {
    return _mm256_blendv_ps(rest, v, _mm256_castsi256_ps(lanes_below(left)));
  }

  static F zero() { return _mm256_setzero_ps(); }
  static F set(float x) { return _mm256_set1_ps(x); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }  // b if one is NaN
  static F max(F a, F b) { return _mm256_max_ps(a, b); }  // b if one is NaN
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F negate(F a) { return _mm256_xor_ps(a, set(-0.0f)); }
  static F round(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // v * 2^n for whole n of -152 to 128 and v near 1: in two steps, since 2^n alone may not be
  // normal. The first is exact.
  static F scale_by_power(F v, F n) {
    const I whole = _mm256_cvtps_epi32(n);
    const I half = _mm256_srai_epi32(whole, 1);
    const auto power = [](I e) {
      return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e, set32(127)), 23));
    };
    return mul(mul(v, power(half)), power(_mm256_sub_epi32(whole, half)));
  }

  static I zero_bits() { return _mm256_setzero_si256(); }
  static I set32(int x) { return _mm256_set1_epi32(x); }
  static I set8(int x) { return _mm256_set1_epi8(static_cast<char>(x)); }
  static I bits(F v) { return _mm256_castps_si256(v); }
  static F floats(I v) { return _mm256_castsi256_ps(v); }
  static I load_bits(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static void store_bits(void* p, I v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
  static I bit_and(I a, I b) { return _mm256_and_si256(a, b); }
  static I bit_or(I a, I b) { return _mm256_or_si256(a, b); }
  static I bit_xor(I a, I b) { return _mm256_xor_si256(a, b); }
  static I add8(I a, I b) { return _mm256_add_epi8(a, b); }
  static I add16(I a, I b) { return _mm256_add_epi16(a, b); }
  static I add32(I a, I b) { return _mm256_add_epi32(a, b); }
  static I sub32(I a, I b) { return _mm256_sub_epi32(a, b); }
  static I min32(I a, I b) { return _mm256_min_epi32(a, b); }
  static I max32(I a, I b) { return _mm256_max_epi32(a, b); }
  static I max_u8(I a, I b) { return _mm256_max_epu8(a, b); }
  template <int kN>
  static I right32(I a) {
    return _mm256_srli_epi32(a, kN);
  }
  template <int kN>
  static I left32(I a) {
    return _mm256_slli_epi32(a, kN);
  }
  template <int kN>
  static I right16(I a) {
    return _mm256_srli_epi16(a, kN);
  }
  static I where_greater(I a, I b, I yes, I no) {
    return _mm256_blendv_epi8(no, yes, _mm256_cmpgt_epi32(a, b));
  }
  static bool any_byte_is(I v, int byte) {
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(v, set8(byte))) != 0;
  }
  static I to_int(F v) { return _mm256_cvtps_epi32(v); }
  static F to_float(I v) { return _mm256_cvtepi32_ps(v); }
  // Pairs of neighbours: unsigned a times signed b to saturated 16 bits, and 16 bits to 32.
  static I dot_u8_s8(I a, I b) { return _mm256_maddubs_epi16(a, b); }
  static I dot_16(I a, I b) { return _mm256_madd_epi16(a, b); }

  static I widen_s8(const void* p) {  // kBytes / 2 codes to 16 bits
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  }
  static F widen_bf16(const uint16_t* p) {  // kWidth values
    const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return floats(left32<16>(_mm256_cvtepu16_epi32(v)));
  }
  static F widen_half(I v, int part) {  // part 0 or 1 of 2 * kWidth halves
    return _mm256_cvtph_ps(part == 0 ? _mm256_castsi256_si128(v) : _mm256_extracti128_si256(v, 1));
  }
  static I left_7_words(I v) { return _mm256_slli_epi16(v, 7); }
  // kWidth lanes to bytes, saturated.
  static void store_bytes(void* p, I v, bool is_signed, int64_t left) {
    const __m128i low = _mm256_castsi256_si128(v);
    const __m128i high = _mm256_extracti128_si256(v, 1);
    const __m128i words = _mm_packs_epi32(low, high);
    const __m128i bytes =
        is_signed ? _mm_packs_epi16(words, words) : _mm_packus_epi16(words, words);
    const int64_t out = _mm_cvtsi128_si64(bytes);
    __builtin_memcpy(p, &out, static_cast<size_t>(left >= kWidth ? kWidth : left));
  }

  // Halves folded to 128 bits.
  static __m128 half_sum(F v) {
    return _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  }
  static __m128i half_sum(I v) {
    return _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  }
  static float largest(F v) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
  }
  static uint32_t largest(I v) {  // of lanes without sign
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(m));
  }
  // Within each 128 bits, the sums of neighbours' lanes: 4 vectors to one.
  static F fold4(F a, F b, F c, F d) {
    const F ab = add(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    const F cd = add(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    return add(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  }
  static I fold4(I a, I b, I c, I d) {
    const I ab = add32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    const I cd = add32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
    return add32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
  }
};

}  // namespace
}  // namespace sortie::cpu
