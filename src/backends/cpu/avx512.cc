// The AVX-512 set: gemm's formats lie in files of their own, everything else is here.
#include <immintrin.h>

#include "backends/cpu/avx512_gemm.h"
#include "backends/cpu/avx512_math.h"
#include "backends/cpu/kernels.h"

namespace sortie::cpu {
namespace {

using quant::Format;

inline __mmask16 first_lanes(int64_t n) {
  return n >= 16 ? static_cast<__mmask16>(0xffff) : static_cast<__mmask16>((1U << n) - 1U);
}
inline __m512 load(const float* x, int64_t left) {
  return left >= 16 ? _mm512_loadu_ps(x) : _mm512_maskz_loadu_ps(first_lanes(left), x);
}
inline void store(float* x, __m512 v, int64_t left) {
  if (left >= 16) {
    _mm512_storeu_ps(x, v);
  } else {
    _mm512_mask_storeu_ps(x, first_lanes(left), v);
  }
}
// Halves folded until one lane is left.
inline float lane_sum(__m512 v) {
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}

int64_t prepared_bytes(Format format, int64_t k) {
  const int64_t padded = (k + quant::kGroup - 1) / quant::kGroup * quant::kGroup;
  switch (format) {
    case Format::kBf16:
      return 4 * padded;
    case Format::kW8A8Int8:
      return padded;
    case Format::kFp8Block:
    case Format::kW4Afp8:
      return 2 * padded;
    default:
      return 0;
  }
}

void gemm(const Panel& p) {
  switch (p.format) {
    case Format::kF32:
      return avx512_gemm_f32(p);
    case Format::kBf16:
      return avx512_gemm_bf16(p);
    default:
      return avx512_gemm_tiles(p);
  }
}

template <bool kBf16>
inline __m512 load_b(const void* row, int64_t column, __mmask16 m) {
  if constexpr (kBf16) {
    const __m256i v = _mm256_maskz_loadu_epi16(m, static_cast<const uint16_t*>(row) + column);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
  } else {
    return _mm512_maskz_loadu_ps(m, static_cast<const float*>(row) + column);
  }
}

// kRows rows of c, kVectors * 16 columns from `column` on, in registers over all of the depth.
template <int kRows, int kVectors, bool kBf16>
void accumulate_tile(const Accumulate& p, int64_t row, int64_t column) {
  __m512 acc[kRows][kVectors];
  __mmask16 m[kVectors];
  unroll<kVectors>([&](auto v) SORTIE_INLINE {
    const int64_t left = p.columns - column - 16 * v.value;
    m[v.value] = left > 0 ? first_lanes(left) : static_cast<__mmask16>(0);
  });
  float* c = p.c + row * p.c_stride + column;
  unroll<kRows>([&](auto r) SORTIE_INLINE {
    const float factor = p.factor[row + r.value];
    unroll<kVectors>([&](auto v) SORTIE_INLINE {
      // Factor 0 starts from zero whatever stands there.
      const __mmask16 read = factor == 0 ? static_cast<__mmask16>(0) : m[v.value];
      const __m512 old = _mm512_maskz_loadu_ps(read, c + r.value * p.c_stride + 16 * v.value);
      acc[r.value][v.value] = _mm512_mul_ps(old, _mm512_set1_ps(factor));
    });
  });
  const float* a = p.a + row * p.a_stride;
  for (int64_t i = 0; i < p.depth; ++i) {
    __m512 b[kVectors];
    unroll<kVectors>([&](auto v) SORTIE_INLINE {
      b[v.value] = held(load_b<kBf16>(p.b[i], column + 16 * v.value, m[v.value]));
    });
    unroll<kRows>([&](auto r) SORTIE_INLINE {
      const __m512 weight = held(_mm512_set1_ps(a[r.value * p.a_stride + i]));
      unroll<kVectors>([&](auto v) SORTIE_INLINE {
        acc[r.value][v.value] = _mm512_fmadd_ps(weight, b[v.value], acc[r.value][v.value]);
      });
    });
  }
  unroll<kRows>([&](auto r) SORTIE_INLINE {
    unroll<kVectors>([&](auto v) SORTIE_INLINE {
      _mm512_mask_storeu_ps(c + r.value * p.c_stride + 16 * v.value, m[v.value],
                            acc[r.value][v.value]);
    });
  });
}

template <bool kBf16>
void accumulate_rows(const Accumulate& p) {
  int64_t row = 0;
  for (; row + 6 <= p.rows; row += 6) {
    for (int64_t c = 0; c < p.columns; c += 64) accumulate_tile<6, 4, kBf16>(p, row, c);
  }
  for (; row + 2 <= p.rows; row += 2) {
    for (int64_t c = 0; c < p.columns; c += 128) accumulate_tile<2, 8, kBf16>(p, row, c);
  }
  // Wide, since a single row is bound by reading b: 512 bytes of bf16 at a time.
  for (; row < p.rows; ++row) {
    for (int64_t c = 0; c < p.columns; c += 256) accumulate_tile<1, 16, kBf16>(p, row, c);
  }
}

void accumulate(const Accumulate& p) {
  if (p.b_is_bf16) {
    accumulate_rows<true>(p);
  } else {
    accumulate_rows<false>(p);
  }
}

float softmax_block(float* s, int64_t n, float scale, float* max, float* sum) {
  const __m512 lowest = _mm512_set1_ps(-__builtin_inff());
  const __m512 factor = _mm512_set1_ps(scale);
  __m512 largest = lowest;
  for (int64_t i = 0; i < n; i += 16) {
    const __m512 v = _mm512_mul_ps(load(s + i, n - i), factor);
    // NaN second, so that it is kept.
    largest = _mm512_max_ps(largest, _mm512_mask_mov_ps(lowest, first_lanes(n - i), v));
    store(s + i, v, n - i);
  }
  const float block = _mm512_reduce_max_ps(largest);
  const float now = *max > block ? *max : block;
  const __m512 shift = _mm512_set1_ps(now);
  __m512 total = _mm512_setzero_ps();
  for (int64_t i = 0; i < n; i += 16) {
    const __m512 p =
        _mm512_maskz_mov_ps(first_lanes(n - i), exp(_mm512_sub_ps(load(s + i, n - i), shift)));
    total = _mm512_add_ps(total, p);
    store(s + i, p, n - i);
  }
  const float kept = _mm512_cvtss_f32(exp(_mm512_set1_ps(*max - now)));
  *sum = *sum * kept + lane_sum(total);
  *max = now;
  return kept;
}

uint32_t amax_bits(const float* x, int64_t n) {
  __m512i largest = _mm512_setzero_si512();
  for (int64_t i = 0; i < n; i += 16) {
    const __m512i bits = _mm512_castps_si512(load(x + i, n - i));
    largest = _mm512_max_epu32(largest, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
  }
  return _mm512_reduce_max_epu32(largest);
}

// base/scalar.h's to_e4m3 on 16 values.
inline __m128i to_e4m3(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
  const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80));
  const __m512i even = _mm512_and_si512(_mm512_srli_epi32(magnitude, 20), _mm512_set1_epi32(1));
  __m512i code = _mm512_add_epi32(_mm512_add_epi32(magnitude, _mm512_set1_epi32(0x7ffff)), even);
  code = _mm512_sub_epi32(_mm512_srli_epi32(code, 20), _mm512_set1_epi32(120 << 3));
  code = _mm512_min_epi32(code, _mm512_set1_epi32(0x7e));
  // Below 2^-6: multiples of 2^-9.
  const __m512 small = _mm512_mul_ps(_mm512_castsi512_ps(magnitude), _mm512_set1_ps(0x1p9f));
  const __mmask16 is_small =
      _mm512_cmplt_epu32_mask(magnitude, _mm512_castps_si512(_mm512_set1_ps(0x1p-6f)));
  code = _mm512_mask_cvtps_epi32(code, is_small, small);
  const __mmask16 is_nan = _mm512_cmpgt_epu32_mask(magnitude, _mm512_set1_epi32(0x7f800000));
  code = _mm512_mask_mov_epi32(code, is_nan, _mm512_set1_epi32(0x7f));
  return _mm512_cvtepi32_epi8(_mm512_or_si512(code, sign));
}

void e4m3_codes(const float* x, int64_t n, float scale, uint8_t* codes) {
  const __m512 s = _mm512_set1_ps(scale);
  for (int64_t i = 0; i < n; i += 16) {
    const __m128i code = to_e4m3(_mm512_div_ps(load(x + i, n - i), s));
    _mm_mask_storeu_epi8(codes + i, first_lanes(n - i), code);
  }
}

void int8_codes(const float* x, int64_t n, float multiplier, int8_t* codes) {
  const __m512 m = _mm512_set1_ps(multiplier);
  for (int64_t i = 0; i < n; i += 16) {
    const __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(load(x + i, n - i), m));
    _mm_mask_storeu_epi8(codes + i, first_lanes(n - i), _mm512_cvtsepi32_epi8(code));
  }
}

float sum_squares(const float* x, int64_t n) {
  __m512 sum[4] = {};
  for (int64_t i = 0; i < n; i += 64) {
    for (int j = 0; j < 4; ++j) {
      const int64_t left = n - i - 16 * j;
      const __m512 v = left > 0 ? load(x + i + 16 * j, left) : _mm512_setzero_ps();
      sum[j] = _mm512_fmadd_ps(v, v, sum[j]);
    }
  }
  return lane_sum(_mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3])));
}

void norm(const float* x, const float* weight, float scale, int64_t n, float* out) {
  const __m512 s = _mm512_set1_ps(scale);
  for (int64_t i = 0; i < n; i += 16) {
    const __m512 y = _mm512_mul_ps(load(x + i, n - i), s);
    store(out + i, _mm512_mul_ps(y, load(weight + i, n - i)), n - i);
  }
}

void silu_mul(const float* gate, const float* up, int64_t n, float* out) {
  const __m512 one = _mm512_set1_ps(1.0f);
  for (int64_t i = 0; i < n; i += 16) {
    const __m512 g = load(gate + i, n - i);
    const __m512 e = exp(_mm512_xor_ps(g, _mm512_set1_ps(-0.0f)));
    const __m512 silu = _mm512_div_ps(g, _mm512_add_ps(one, e));
    store(out + i, _mm512_mul_ps(silu, load(up + i, n - i)), n - i);
  }
}

void add(const float* x, int64_t n, float* sum) {
  for (int64_t i = 0; i < n; i += 16) {
    store(sum + i, _mm512_add_ps(load(sum + i, n - i), load(x + i, n - i)), n - i);
  }
}

void weigh(const float* x, float weight, int64_t n, bool first, float* sum) {
  const __m512 w = _mm512_set1_ps(weight);
  for (int64_t i = 0; i < n; i += 16) {
    const __m512 y = _mm512_mul_ps(w, load(x + i, n - i));
    store(sum + i, first ? y : _mm512_add_ps(load(sum + i, n - i), y), n - i);
  }
}

uint64_t read(const std::byte* p, int64_t bytes) {
  __m512i sum[4] = {};
  for (int64_t i = 0; i < bytes; i += 512) {
    for (int j = 0; j < 8; ++j) {
      sum[j % 4] = _mm512_or_si512(sum[j % 4], _mm512_loadu_si512(p + i + 64 * j));
    }
  }
  return static_cast<uint64_t>(_mm512_reduce_or_epi64(
      _mm512_or_si512(_mm512_or_si512(sum[0], sum[1]), _mm512_or_si512(sum[2], sum[3]))));
}

// 12 chains hide the latency. The barrier keeps the compiler from folding equal steps.
template <typename Step>
int64_t repeat(int64_t rounds, int64_t operations, const Step& step) {
  __m512i chain[12] = {};
  for (int64_t i = 0; i < rounds; ++i) {
    for (__m512i& c : chain) {
      c = step(c);
      asm volatile("" : "+v"(c));
    }
  }
  return rounds * 12 * operations;
}

int64_t multiply(int arithmetic, int64_t rounds) {
  const __m512i small = _mm512_set1_epi32(0x00010001);
  const __m512 half = _mm512_set1_ps(0.5f);
  const auto bits = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3f00));
  switch (arithmetic) {
    case 0:
      return repeat(rounds, 32, [half](__m512i c) {
        return _mm512_castps_si512(_mm512_fmadd_ps(_mm512_castsi512_ps(c), half, half));
      });
    case 1:
      return repeat(rounds, 64, [bits](__m512i c) {
        return _mm512_castps_si512(_mm512_dpbf16_ps(_mm512_castsi512_ps(c), bits, bits));
      });
    default:
      return repeat(rounds, 128,
                    [small](__m512i c) { return _mm512_dpbusd_epi32(c, small, small); });
  }
}

}  // namespace

const Kernels kAvx512Kernels = {
    .prepared_bytes = prepared_bytes,
    .prepare = avx512_prepare,
    .gemm = gemm,
    .tile_bytes = tile_bytes,
    .accumulate = accumulate,
    .dequantise = avx512_dequantise,
    .softmax_block = softmax_block,
    .attend_prepare = avx512_attend_prepare,
    .attend = avx512_attend,
    .amax_bits = amax_bits,
    .e4m3_codes = e4m3_codes,
    .int8_codes = int8_codes,
    .sum_squares = sum_squares,
    .norm = norm,
    .silu_mul = silu_mul,
    .add = add,
    .weigh = weigh,
    .read = read,
    .multiply = multiply,
};

}  // namespace sortie::cpu
