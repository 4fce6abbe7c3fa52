#pragma once

#include "backends/cpu/kernels.h"

// All kernels but gemm, written once over `Simd`, which one of simd_*.h has defined before this is
// included. Everything is in an unnamed namespace: kernels.h says why.
namespace sortie::cpu {
namespace {

using F = Simd::F;
using I = Simd::I;
constexpr int kWidth = Simd::kWidth;

// Keeps a value that several instructions use in its register. GCC otherwise loads it again as each
// one's memory operand.
template <typename V>
[[maybe_unused]] inline V held(V v) {
  asm("" : "+v"(v));
  return v;
}

// f(Index<0>) ... f(Index<n-1>), all inlined, so that arrays of sums become registers.
template <int kI>
struct Index {
  static constexpr int value = kI;
};
#define SORTIE_INLINE __attribute__((always_inline))
template <int kN, int kI = 0, typename Body>
[[maybe_unused]] SORTIE_INLINE inline void unroll(const Body& body) {
  if constexpr (kI < kN) {
    body(Index<kI>{});
    unroll<kN, kI + 1>(body);
  }
}

inline float lane_sum(F v) {
  __m128 quarter = Simd::half_sum(v);
  quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}

// e^x within about 1 ulp: x = n ln 2 + r, |r| <= ln 2 / 2, e^r = 1 + r + r^2 q(r) with q of degree
// 4 (Chebyshev fit, relative error 1.1e-8), times 2^n. Below -104 the result is 0, above 88.73
// infinite; NaN stays.
inline F exp(F x) {
  // min and max return their second operand if one is NaN.
  x = Simd::min(Simd::set(89.0f), Simd::max(Simd::set(-105.0f), x));
  const F n = Simd::round(Simd::mul(x, Simd::set(0x1.715476p+0f)));
  F r = Simd::fma(n, Simd::set(-0x1.62e4p-1f), x);
  r = Simd::fma(n, Simd::set(-0x1.7f7d1cp-20f), r);
  F q = Simd::set(0x1.6d117cp-10f);
  q = Simd::fma(q, r, Simd::set(0x1.120be2p-7f));
  q = Simd::fma(q, r, Simd::set(0x1.555518p-5f));
  q = Simd::fma(q, r, Simd::set(0x1.5554dcp-3f));
  q = Simd::fma(q, r, Simd::set(0.5f));
  // 1 + (r + r^2 q): the small terms first, so that one rounding decides the last bit.
  const F small = Simd::fma(Simd::mul(r, r), q, r);
  return Simd::scale_by_power(Simd::add(Simd::set(1.0f), small), n);
}

// kRows rows of c, kVectors vectors of columns from `column` on, in registers over all of the
// depth. kTail: the last columns, masked.
template <int kRows, int kVectors, bool kBf16, bool kTail>
void accumulate_tile(const Accumulate& p, int64_t row, int64_t column) {
  static_assert(kVectors == 1 || !kTail);
  const int64_t left = kTail ? p.columns - column : kWidth;
  const auto load = [left](const float* x)
                        SORTIE_INLINE { return kTail ? Simd::load(x, left) : Simd::load(x); };
  const auto load_b = [&](int64_t i, int v) SORTIE_INLINE {
    if constexpr (kBf16) {
      const auto* b = static_cast<const uint16_t*>(p.b[i]) + column + v * kWidth;
      if constexpr (!kTail) return Simd::widen_bf16(b);
      uint16_t padded[kWidth] = {};
      __builtin_memcpy(padded, b, static_cast<size_t>(left) * sizeof *b);
      return Simd::widen_bf16(padded);
    } else {
      return load(static_cast<const float*>(p.b[i]) + column + v * kWidth);
    }
  };
  float* c = p.c + row * p.c_stride + column;
  F acc[kRows][kVectors];
  unroll<kRows>([&](auto r) SORTIE_INLINE {
    const float factor = p.factor[row + r.value];
    unroll<kVectors>([&](auto v) SORTIE_INLINE {
      // Factor 0 starts from zero whatever stands there.
      acc[r.value][v.value] =
          factor == 0
              ? Simd::zero()
              : Simd::mul(load(c + r.value * p.c_stride + v.value * kWidth), Simd::set(factor));
    });
  });
  const float* a = p.a + row * p.a_stride;
  for (int64_t i = 0; i < p.depth; ++i) {
    F b[kVectors];
    unroll<kVectors>([&](auto v) SORTIE_INLINE {
      b[v.value] = load_b(i, v.value);
      if (kRows > 1) b[v.value] = held(b[v.value]);
    });
    unroll<kRows>([&](auto r) SORTIE_INLINE {
      const F weight = held(Simd::set(a[r.value * p.a_stride + i]));
      unroll<kVectors>([&](auto v) SORTIE_INLINE {
        acc[r.value][v.value] = Simd::fma(weight, b[v.value], acc[r.value][v.value]);
      });
    });
  }
  unroll<kRows>([&](auto r) SORTIE_INLINE {
    unroll<kVectors>([&](auto v) SORTIE_INLINE {
      float* to = c + r.value * p.c_stride + v.value * kWidth;
      if (kTail) {
        Simd::store(to, acc[r.value][v.value], left);
      } else {
        Simd::store(to, acc[r.value][v.value]);
      }
    });
  });
}

template <int kRows, int kVectors, bool kBf16>
void accumulate_columns(const Accumulate& p, int64_t row) {
  int64_t c = 0;
  for (; c + kVectors * kWidth <= p.columns; c += kVectors * kWidth)
    accumulate_tile<kRows, kVectors, kBf16, false>(p, row, c);
  for (; c + kWidth <= p.columns; c += kWidth) accumulate_tile<kRows, 1, kBf16, false>(p, row, c);
  if (c < p.columns) accumulate_tile<kRows, 1, kBf16, true>(p, row, c);
}

template <bool kBf16>
void accumulate_rows(const Accumulate& p) {
  constexpr int kUnit = Simd::kRegisters / 16;
  int64_t row = 0;
  for (; row + 6 <= p.rows; row += 6) accumulate_columns<6, 2 * kUnit, kBf16>(p, row);
  for (; row + 2 <= p.rows; row += 2) accumulate_columns<2, 4 * kUnit, kBf16>(p, row);
  // Wide, since a single row is bound by reading b.
  for (; row < p.rows; ++row) accumulate_columns<1, 8 * kUnit, kBf16>(p, row);
}

void accumulate(const Accumulate& p) {
  if (p.b_is_bf16) {
    accumulate_rows<true>(p);
  } else {
    accumulate_rows<false>(p);
  }
}

float softmax_block(float* s, int64_t n, float scale, float* max, float* sum) {
  const F lowest = Simd::set(-__builtin_inff());
  const F factor = Simd::set(scale);
  F largest = lowest;
  for (int64_t i = 0; i < n; i += kWidth) {
    const F v = Simd::mul(Simd::load(s + i, n - i), factor);
    // NaN second, so that it is kept.
    largest = Simd::max(largest, Simd::keep(v, n - i, lowest));
    Simd::store(s + i, v, n - i);
  }
  const float block = Simd::largest(largest);
  const float now = *max > block ? *max : block;
  const F shift = Simd::set(now);
  F total = Simd::zero();
  for (int64_t i = 0; i < n; i += kWidth) {
    const F p = Simd::keep(exp(Simd::sub(Simd::load(s + i, n - i), shift)), n - i, Simd::zero());
    total = Simd::add(total, p);
    Simd::store(s + i, p, n - i);
  }
  float kept[kWidth];
  Simd::store(kept, exp(Simd::set(*max - now)));
  *sum = *sum * kept[0] + lane_sum(total);
  *max = now;
  return kept[0];
}

uint32_t amax_bits(const float* x, int64_t n) {
  I largest = Simd::zero_bits();
  for (int64_t i = 0; i < n; i += kWidth) {
    const I bits = Simd::bits(Simd::load(x + i, n - i));
    largest = Simd::max32(largest, Simd::bit_and(bits, Simd::set32(0x7fffffff)));
  }
  return Simd::largest(largest);
}

// base/scalar.h's to_e4m3, a code in each lane.
inline I to_e4m3(F x) {
  const I bits = Simd::bits(x);
  const I magnitude = Simd::bit_and(bits, Simd::set32(0x7fffffff));
  const I sign = Simd::bit_and(Simd::right32<24>(bits), Simd::set32(0x80));
  const I even = Simd::bit_and(Simd::right32<20>(magnitude), Simd::set32(1));
  const I rounded = Simd::add32(Simd::add32(magnitude, Simd::set32(0x7ffff)), even);
  // A NaN may pass into the sign bit here; its code is replaced below.
  I code = Simd::sub32(Simd::right32<20>(rounded), Simd::set32(120 << 3));
  code = Simd::min32(code, Simd::set32(0x7e));
  // Below 2^-6: multiples of 2^-9.
  const I small = Simd::to_int(Simd::mul(Simd::floats(magnitude), Simd::set(0x1p9f)));
  code = Simd::where_greater(Simd::bits(Simd::set(0x1p-6f)), magnitude, small, code);
  code = Simd::where_greater(magnitude, Simd::set32(0x7f800000), Simd::set32(0x7f), code);
  return Simd::bit_or(code, sign);
}

void e4m3_codes(const float* x, int64_t n, float scale, uint8_t* codes) {
  const F s = Simd::set(scale);
  for (int64_t i = 0; i < n; i += kWidth) {
    const I code = to_e4m3(Simd::div(Simd::load(x + i, n - i), s));
    Simd::store_bytes(codes + i, code, false, n - i);
  }
}

void int8_codes(const float* x, int64_t n, float multiplier, int8_t* codes) {
  const F m = Simd::set(multiplier);
  for (int64_t i = 0; i < n; i += kWidth) {
    const I code = Simd::to_int(Simd::mul(Simd::load(x + i, n - i), m));
    Simd::store_bytes(codes + i, code, true, n - i);
  }
}

float sum_squares(const float* x, int64_t n) {
  F sum[4] = {Simd::zero(), Simd::zero(), Simd::zero(), Simd::zero()};
  for (int64_t i = 0; i < n; i += 4 * kWidth) {
    for (int j = 0; j < 4; ++j) {
      const int64_t left = n - i - kWidth * j;
      const F v = left > 0 ? Simd::load(x + i + kWidth * j, left) : Simd::zero();
      sum[j] = Simd::fma(v, v, sum[j]);
    }
  }
  return lane_sum(Simd::add(Simd::add(sum[0], sum[1]), Simd::add(sum[2], sum[3])));
}

void norm(const float* x, const float* weight, float scale, int64_t n, float* out) {
  const F s = Simd::set(scale);
  for (int64_t i = 0; i < n; i += kWidth) {
    const F y = Simd::mul(Simd::load(x + i, n - i), s);
    Simd::store(out + i, Simd::mul(y, Simd::load(weight + i, n - i)), n - i);
  }
}

void silu_mul(const float* gate, const float* up, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += kWidth) {
    const F g = Simd::load(gate + i, n - i);
    const F silu = Simd::div(g, Simd::add(Simd::set(1.0f), exp(Simd::negate(g))));
    Simd::store(out + i, Simd::mul(silu, Simd::load(up + i, n - i)), n - i);
  }
}

void add(const float* x, int64_t n, float* sum) {
  for (int64_t i = 0; i < n; i += kWidth)
    Simd::store(sum + i, Simd::add(Simd::load(sum + i, n - i), Simd::load(x + i, n - i)), n - i);
}

void weigh(const float* x, float weight, int64_t n, bool first, float* sum) {
  const F w = Simd::set(weight);
  for (int64_t i = 0; i < n; i += kWidth) {
    const F y = Simd::mul(w, Simd::load(x + i, n - i));
    Simd::store(sum + i, first ? y : Simd::add(Simd::load(sum + i, n - i), y), n - i);
  }
}

uint64_t read(const std::byte* p, int64_t bytes) {
  I any[4] = {Simd::zero_bits(), Simd::zero_bits(), Simd::zero_bits(), Simd::zero_bits()};
  for (int64_t i = 0; i < bytes; i += 64) {
    // As far ahead as the GEMMs ask: a bound must not read slower than what it bounds.
    _mm_prefetch(reinterpret_cast<const char*>(p) + i + 8192, _MM_HINT_T1);
    for (int j = 0; j < 64; j += Simd::kBytes) {
      I& one = any[(i + j) / Simd::kBytes % 4];
      one = Simd::bit_or(one, Simd::load_bits(p + i + j));
    }
  }
  return Simd::largest(
      Simd::bit_and(Simd::bit_or(Simd::bit_or(any[0], any[1]), Simd::bit_or(any[2], any[3])),
                    Simd::set32(0x7fffffff)));
}

// 12 chains hide the latency. The barrier keeps the compiler from folding equal steps.
template <typename Step>
int64_t repeat(int64_t rounds, int64_t operations, const Step& step) {
  I chain[12];
  unroll<12>([&](auto i) SORTIE_INLINE { chain[i.value] = Simd::zero_bits(); });
  for (int64_t n = 0; n < rounds; ++n) {
    unroll<12>([&](auto i) SORTIE_INLINE { chain[i.value] = held(step(chain[i.value])); });
  }
  I sink = chain[0];
  unroll<11>([&](auto i) SORTIE_INLINE { sink = Simd::bit_or(sink, chain[i.value + 1]); });
  asm volatile("" : : "v"(sink));
  return rounds * 12 * operations;
}

// There are no bf16 products here: what such formats do is fp32.
int64_t multiply(int arithmetic, int64_t rounds) {
  constexpr int kInt8 = 2;
  if (arithmetic == kInt8) {
    const I small = Simd::set32(0x00010001);
    return repeat(rounds, 4 * kWidth,
                  [small](I c) SORTIE_INLINE { return Simd::add32(c, Simd::dot_16(c, small)); });
  }
  const F half = Simd::set(0.5f);
  return repeat(rounds, 2 * kWidth, [half](I c) SORTIE_INLINE {
    return Simd::bits(Simd::fma(Simd::floats(c), half, half));
  });
}

}  // namespace
}  // namespace sortie::cpu
