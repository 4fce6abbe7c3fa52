#pragma once

#include "backends/cpu/simd_rows.h"

// gemm and prepare for all formats over `Simd`, for sets without VNNI and BF16. The walk is that of
// avx512_gemm.h: up to kStreamed rows read a weight row at a time as one stream; with more, 4
// weight rows are unpacked once a block of k for all rows. Both do the same sums in the same order.
//
//   f32, bf16   fp32 products; two sums of kWidth lanes an output
//   fp8_block   e4m3 becomes fp32 through half precision; a group is one sum of kWidth lanes
//   w4afp8      integers: an e4m3 value times 512 is three digits in base 64, and unsigned bytes
//               (code + 8) times digits cannot reach VPMADDUBSW's saturation; group sums are exact
//   w8a8_int8   both sides widened to 16 bits for VPMADDWD; exact
namespace sortie::cpu {
namespace {

using quant::Format;
using quant::kGroup;

constexpr float kNan = __builtin_nanf("");

[[maybe_unused]] SORTIE_INLINE inline void prefetch_ahead(const void* w) {
  _mm_prefetch(static_cast<const char*>(w) + 8192, _MM_HINT_T1);
}

inline int64_t round_up(int64_t k, int64_t step) { return (k + step - 1) / step * step; }

inline void store_columns(float* out, __m128 y, int64_t columns) {
  if (columns >= kPanelColumns) {
    _mm_storeu_ps(out, y);
    return;
  }
  float all[kPanelColumns];
  _mm_storeu_ps(all, y);
  for (int64_t j = 0; j < columns; ++j) out[j] = all[j];
}

// `bytes` bytes of weights, of which only the first `there` may be read: in place if that is all.
inline const std::byte* padded(const std::byte* w, int64_t there, int64_t bytes, std::byte* space) {
  if (there >= bytes) return w;
  __builtin_memset(space, 0, static_cast<size_t>(bytes));
  __builtin_memcpy(space, w, static_cast<size_t>(there));
  return space;
}

// ---- f32, bf16

constexpr int64_t kStep = 2 * kWidth;

struct Pair {
  F first;
  F second;
};

struct F32Weights {
  using Scalar = float;
  static Pair load(const float* w) { return {Simd::load(w), Simd::load(w + kWidth)}; }
  static Pair load(const float* w, int64_t left) {
    return {Simd::load(w, left), Simd::load(w + kWidth, left - kWidth)};
  }
  // Activations lie as they came, so what is past their end is not read either.
  static Pair activations(const float* x, int64_t left) { return load(x, left); }
};

// The sums take a step's even and its odd channels: a shift and a mask away from fp32.
struct Bf16Weights {
  using Scalar = uint16_t;
  static Pair load(const uint16_t* w) {
    const I v = Simd::load_bits(w);
    return {Simd::floats(Simd::left32<16>(v)), Simd::floats(Simd::bit_and(v, Simd::set32(-65536)))};
  }
  static Pair load(const uint16_t* w, int64_t left) {
    uint16_t all[kStep] = {};
    __builtin_memcpy(all, w, static_cast<size_t>(left) * sizeof *w);
    return load(all);
  }
  // Prepared activations are padded with zeros.
  static Pair activations(const float* x, int64_t /*left*/) { return F32Weights::load(x); }
};

template <typename W>
struct F32Gemm {
  using Acc = Pair;
  using Scalar = typename W::Scalar;
  static constexpr int kRows = Simd::kRowsF32;
  static constexpr int kStreamed = 3;
  static constexpr int64_t kBlock = 64 * kWidth;
  static int64_t weight_bytes(int64_t k) { return k * static_cast<int64_t>(sizeof(Scalar)); }

  static const float* x(const GemmRow& row) { return reinterpret_cast<const float*>(row.x); }
  SORTIE_INLINE static void add(Pair* acc, const Pair& x, const Pair& w) {
    acc->first = Simd::fma(x.first, w.first, acc->first);
    acc->second = Simd::fma(x.second, w.second, acc->second);
  }

  template <int R>
  static void dot(const Panel& p, int64_t n, Acc (&acc)[R]) {
    const auto* w = reinterpret_cast<const Scalar*>(p.w + n * p.w_stride);
    Acc a[R];
    unroll<R>([&](auto r) SORTIE_INLINE { a[r.value] = {Simd::zero(), Simd::zero()}; });
    int64_t k = 0;
    for (; k + kStep <= p.k; k += kStep) {
      prefetch_ahead(w + k);
      const Pair weights = W::load(w + k);
      unroll<R>([&](auto r) SORTIE_INLINE {
        add(&a[r.value], F32Weights::load(x(p.rows[r.value]) + k), weights);
      });
    }
    if (k < p.k) {
      const Pair weights = W::load(w + k, p.k - k);
      unroll<R>([&](auto r) SORTIE_INLINE {
        add(&a[r.value], W::activations(x(p.rows[r.value]) + k, p.k - k), weights);
      });
    }
    unroll<R>([&](auto r) SORTIE_INLINE { acc[r.value] = a[r.value]; });
  }

  struct Block {
    int64_t k;
    int64_t size;
    alignas(64) float w[kPanelColumns][kBlock];
    void load_column(const Panel& p, int j, int64_t n) {
      const auto* from = reinterpret_cast<const Scalar*>(p.w + n * p.w_stride) + k;
      for (int64_t i = 0; i < size; i += kStep) {
        const Pair v = size - i >= kStep ? W::load(from + i) : W::load(from + i, size - i);
        Simd::store(w[j] + i, v.first);
        Simd::store(w[j] + i + kWidth, v.second);
      }
    }
  };

  // One of the two sums over the block, for all outputs of the tile.
  template <int R, int kHalf>
  static void half_tile(const Block& b, const GemmRow* rows, Acc (*acc)[kPanelColumns]) {
    const auto of = [](Acc& a) SORTIE_INLINE -> F& { return kHalf == 0 ? a.first : a.second; };
    F a[R][kPanelColumns];
    unroll<R>([&](auto r) SORTIE_INLINE {
      unroll<kPanelColumns>([&](auto j) SORTIE_INLINE {
        a[r.value][j.value] = b.k == 0 ? Simd::zero() : of(acc[r.value][j.value]);
      });
    });
    const auto step = [&](int64_t at, auto load_x) SORTIE_INLINE {
      F row[R];
      unroll<R>([&](auto r)
                    SORTIE_INLINE { row[r.value] = held(load_x(x(rows[r.value]) + b.k + at)); });
      unroll<kPanelColumns>([&](auto j) SORTIE_INLINE {
        const F w = held(Simd::load(b.w[j.value] + at));
        unroll<R>([&](auto r) SORTIE_INLINE {
          a[r.value][j.value] = Simd::fma(row[r.value], w, a[r.value][j.value]);
        });
      });
    };
    int64_t k = 0;
    for (; k + kStep <= b.size; k += kStep)
      step(k + kHalf * kWidth, [](const float* v) SORTIE_INLINE { return Simd::load(v); });
    if (k < b.size) {
      const int64_t left = b.size - k;
      step(k + kHalf * kWidth, [left](const float* v) SORTIE_INLINE {
        const Pair both = W::activations(v - kHalf * kWidth, left);
        return kHalf == 0 ? both.first : both.second;
      });
    }
    unroll<R>([&](auto r) SORTIE_INLINE {
      unroll<kPanelColumns>([&](auto j)
                                SORTIE_INLINE { of(acc[r.value][j.value]) = a[r.value][j.value]; });
    });
  }
  template <int R>
  static void tile(const Block& b, const GemmRow* rows, Acc (*acc)[kPanelColumns]) {
    half_tile<R, 0>(b, rows, acc);
    half_tile<R, 1>(b, rows, acc);
  }

  static void store(const Panel& /*panel*/, const GemmRow& row, int64_t n, int64_t columns,
                    const Acc (&a)[kPanelColumns]) {
    const auto sum = [&](int j) { return Simd::add(a[j].first, a[j].second); };
    store_columns(row.out + n, Simd::half_sum(Simd::fold4(sum(0), sum(1), sum(2), sum(3))),
                  columns);
  }
};

// ---- fp8_block

constexpr int kGroupVectors = static_cast<int>(kGroup) / kWidth;

// 2 * kWidth codes as halves of 2^-8 of their value: the exponent's bias is 15 instead of 7, and
// subnormals stay what they are. The two NaN codes become 480; has_nan finds them.
inline I e4m3_halves(const std::byte* codes) {
  const I words = Simd::left_7_words(Simd::widen_s8(codes));
  return Simd::bit_and(words, Simd::set32(static_cast<int>(0xbf80bf80U)));
}
constexpr float kHalfScale = 0x1p8f;

// Whether there is a 0x7f or 0xff: without its sign bit, twice 127.
inline bool has_nan(const std::byte* group) {
  I most = Simd::zero_bits();
  for (int64_t i = 0; i < kGroup; i += Simd::kBytes) {
    const I v = Simd::load_bits(group + i);
    most = Simd::max_u8(most, Simd::add8(v, v));
  }
  return Simd::any_byte_is(most, 0xfe);
}

struct Fp8Gemm {
  struct Acc {
    F sum;
  };
  static constexpr int kRows = Simd::kRowsF32;
  static constexpr int kStreamed = 3;
  static constexpr int64_t kBlock = 4 * kGroup;
  static int64_t weight_bytes(int64_t k) { return k; }

  static const float* x(const GemmRow& row, int64_t group) {
    return reinterpret_cast<const float*>(row.x) + group * kGroup;
  }
  // NaN spoils all outputs of a weight row, as its code would.
  static float weight_scale(const Panel& p, int64_t n, int64_t g, const std::byte* codes) {
    const int64_t groups = (p.k + kGroup - 1) / kGroup;
    return has_nan(codes) ? kNan : static_cast<const float*>(p.w_scales)[n / kGroup * groups + g];
  }

  // kGroups groups from `g` on at once, so that there are that many chains of additions.
  template <int R, int kGroups>
  SORTIE_INLINE static void dot_groups(const Panel& p, int64_t n, int64_t g, const std::byte* w,
                                       F (&acc)[R]) {
    F sum[R][kGroups];
    unroll<R>([&](auto r) SORTIE_INLINE {
      unroll<kGroups>([&](auto i) SORTIE_INLINE { sum[r.value][i.value] = Simd::zero(); });
    });
    unroll<kGroupVectors / 2>([&](auto v) SORTIE_INLINE {
      unroll<kGroups>([&](auto i) SORTIE_INLINE {
        const int64_t at = i.value * kGroup + v.value * kStep;
        if (at % 64 == 0) prefetch_ahead(w + at);
        const I halves = e4m3_halves(w + at);
        unroll<2>([&](auto part) SORTIE_INLINE {
          const F weight = Simd::widen_half(halves, part.value);
          unroll<R>([&](auto r) SORTIE_INLINE {
            const F row = Simd::load(x(p.rows[r.value], g) + at + part.value * kWidth);
            sum[r.value][i.value] = Simd::fma(row, weight, sum[r.value][i.value]);
          });
        });
      });
    });
    unroll<kGroups>([&](auto i) SORTIE_INLINE {
      const float scale = weight_scale(p, n, g + i.value, w + i.value * kGroup);
      unroll<R>([&](auto r) SORTIE_INLINE {
        acc[r.value] =
            Simd::fma(sum[r.value][i.value], Simd::set(p.rows[r.value].scales[g + i.value] * scale),
                      acc[r.value]);
      });
    });
  }

  template <int R>
  static void dot(const Panel& p, int64_t n, Acc (&acc)[R]) {
    const std::byte* w = p.w + n * p.w_stride;
    F a[R];
    unroll<R>([&](auto r) SORTIE_INLINE { a[r.value] = Simd::zero(); });
    int64_t g = 0;
    for (; (g + 2) * kGroup <= p.k; g += 2) dot_groups<R, 2>(p, n, g, w + g * kGroup, a);
    for (; g * kGroup < p.k; ++g) {
      std::byte space[kGroup];
      dot_groups<R, 1>(p, n, g, padded(w + g * kGroup, p.k - g * kGroup, kGroup, space), a);
    }
    unroll<R>([&](auto r) SORTIE_INLINE { acc[r.value].sum = a[r.value]; });
  }

  struct Block {
    int64_t k;
    int64_t size;
    alignas(64) float w[kPanelColumns][kBlock];
    float scales[kPanelColumns][kBlock / kGroup];
    void load_column(const Panel& p, int j, int64_t n) {
      for (int64_t i = 0; i < size; i += kGroup) {
        std::byte space[kGroup];
        const std::byte* codes = padded(p.w + n * p.w_stride + k + i, size - i, kGroup, space);
        scales[j][i / kGroup] = weight_scale(p, n, (k + i) / kGroup, codes);
        for (int64_t c = 0; c < kGroup; c += kStep) {
          const I halves = e4m3_halves(codes + c);
          Simd::store(w[j] + i + c, Simd::widen_half(halves, 0));
          Simd::store(w[j] + i + c + kWidth, Simd::widen_half(halves, 1));
        }
      }
    }
  };

  template <int R>
  static void tile(const Block& b, const GemmRow* rows, Acc (*acc)[kPanelColumns]) {
    for (int64_t i = 0; i < b.size; i += kGroup) {
      const int64_t g = (b.k + i) / kGroup;
      F sum[R][kPanelColumns];
      unroll<R>([&](auto r) SORTIE_INLINE {
        unroll<kPanelColumns>([&](auto j) SORTIE_INLINE { sum[r.value][j.value] = Simd::zero(); });
      });
      for (int64_t c = 0; c < kGroup; c += kWidth) {
        F row[R];
        unroll<R>([&](auto r)
                      SORTIE_INLINE { row[r.value] = held(Simd::load(x(rows[r.value], g) + c)); });
        unroll<kPanelColumns>([&](auto j) SORTIE_INLINE {
          const F w = held(Simd::load(b.w[j.value] + i + c));
          unroll<R>([&](auto r) SORTIE_INLINE {
            sum[r.value][j.value] = Simd::fma(row[r.value], w, sum[r.value][j.value]);
          });
        });
      }
      unroll<R>([&](auto r) SORTIE_INLINE {
        const float row_scale = rows[r.value].scales[g];
        unroll<kPanelColumns>([&](auto j) SORTIE_INLINE {
          F& a = acc[r.value][j.value].sum;
          a = Simd::fma(sum[r.value][j.value], Simd::set(row_scale * b.scales[j.value][i / kGroup]),
                        g == 0 ? Simd::zero() : a);
        });
      });
    }
  }

  static void store(const Panel& /*panel*/, const GemmRow& row, int64_t n, int64_t columns,
                    const Acc (&a)[kPanelColumns]) {
    store_columns(row.out + n, Simd::half_sum(Simd::fold4(a[0].sum, a[1].sum, a[2].sum, a[3].sum)),
                  columns);
  }
};

// ---- w4afp8

// An e4m3 value times 512, a whole number of up to 229,376, as d0 + 64 d1 + 4096 d2.
struct Digits {
  int8_t d[3];
  bool nan;
  int32_t value;
};
struct DigitTable {
  Digits of[256];
};
constexpr DigitTable make_digit_table() {
  DigitTable t{};
  for (int c = 0; c < 256; ++c) {
    const int exponent = (c >> 3) & 15;
    const int mantissa = c & 7;
    const int magnitude = exponent == 0 ? mantissa : (8 + mantissa) << (exponent - 1);
    int value = (c & 0x80) != 0 ? -magnitude : magnitude;
    Digits& digits = t.of[c];
    digits.nan = (c & 0x7f) == 0x7f;
    if (digits.nan) value = 0;
    digits.value = value;
    for (int d = 0; d < 2; ++d) {  // -32 to 31, and the last what is left: up to 56
      const int low = ((value + 32) & 63) - 32;
      digits.d[d] = static_cast<int8_t>(low);
      value = (value - low) / 64;
    }
    digits.d[2] = static_cast<int8_t>(value);
  }
  return t;
}
constexpr DigitTable kDigits = make_digit_table();

struct Int4Gemm {
  struct Acc {
    F sum;
  };
  static constexpr int kRows = Simd::kRowsInt4;
  static constexpr int kStreamed = 3;
  static constexpr int64_t kBlock = 8 * kGroup;
  static constexpr int64_t kGroupBytes = kGroup / 2;
  static constexpr int kVectors = static_cast<int>(kGroup) / Simd::kBytes;
  // Of a prepared group: three planes of digits, then what 8 too much in every code adds up to.
  static constexpr int64_t kPlane = kGroup;
  static constexpr int64_t kPrepared = 3 * kPlane + 4 * kWidth;
  static int64_t weight_bytes(int64_t k) { return k / 2; }

  // Codes plus 8 as bytes: even channels of kBytes bytes, then odd ones, and so on.
  SORTIE_INLINE static void unpack(const std::byte* w, I (&out)[kVectors]) {
    const I low = Simd::set8(0x0f);
    unroll<kVectors / 2>([&](auto v) SORTIE_INLINE {
      const I codes = Simd::bit_xor(Simd::load_bits(w + v.value * Simd::kBytes), Simd::set8(0x88));
      out[2 * v.value] = Simd::bit_and(codes, low);
      out[2 * v.value + 1] = Simd::bit_and(Simd::right16<4>(codes), low);
    });
  }
  static float scale(const Panel& p, int64_t n, int64_t g) {
    const int64_t groups = (p.k + kGroup - 1) / kGroup;
    const uint32_t bits = static_cast<const uint16_t*>(p.w_scales)[n * groups + g];
    // The digits are of 512 times the value. A scale that is not zero is 2^-103 or more.
    return __builtin_bit_cast(float, bits << 16) * 0x1p-9f;
  }
  static I power_of_64(int digit) {
    return Simd::set32(digit == 0 ? 0x00010001 : (digit == 1 ? 0x00400040 : 0x10001000));
  }

  template <int R>
  static void dot(const Panel& p, int64_t n, Acc (&acc)[R]) {
    const std::byte* w = p.w + n * p.w_stride;
    F a[R];
    unroll<R>([&](auto r) SORTIE_INLINE { a[r.value] = Simd::zero(); });
    const int64_t groups = (p.k + kGroup - 1) / kGroup;
    for (int64_t g = 0; g < groups; ++g) {
      std::byte space[kGroupBytes];
      prefetch_ahead(w + g * kGroupBytes);
      I codes[kVectors];
      unpack(padded(w + g * kGroupBytes, (p.k - g * kGroup + 1) / 2, kGroupBytes, space), codes);
      const F weight_scale = Simd::set(scale(p, n, g));
      unroll<R>([&](auto r) SORTIE_INLINE {
        const std::byte* x = p.rows[r.value].x + g * kPrepared;
        I total = Simd::load_bits(x + 3 * kPlane);
        unroll<3>([&](auto d) SORTIE_INLINE {
          I sum = Simd::dot_u8_s8(codes[0], Simd::load_bits(x + d.value * kPlane));
          unroll<kVectors - 1>([&](auto v) SORTIE_INLINE {
            const std::byte* at = x + d.value * kPlane + (v.value + 1) * Simd::kBytes;
            sum = Simd::add16(sum, Simd::dot_u8_s8(codes[v.value + 1], Simd::load_bits(at)));
          });
          total = Simd::add32(total, Simd::dot_16(sum, power_of_64(d.value)));
        });
        a[r.value] = Simd::fma(Simd::to_float(total), weight_scale, a[r.value]);
      });
    }
    unroll<R>([&](auto r) SORTIE_INLINE { acc[r.value].sum = a[r.value]; });
  }

  struct Block {
    int64_t k;
    int64_t size;
    alignas(64) std::byte w[kPanelColumns][kBlock];
    float scales[kPanelColumns][kBlock / kGroup];
    void load_column(const Panel& p, int j, int64_t n) {
      for (int64_t i = 0; i < size; i += kGroup) {
        std::byte space[kGroupBytes];
        const std::byte* from = p.w + n * p.w_stride + (k + i) / 2;
        I codes[kVectors];
        unpack(padded(from, (size - i + 1) / 2, kGroupBytes, space), codes);
        for (int v = 0; v < kVectors; ++v) Simd::store_bits(w[j] + i + v * Simd::kBytes, codes[v]);
        scales[j][i / kGroup] = scale(p, n, (k + i) / kGroup);
      }
    }
  };

  template <int R>
  static void tile(const Block& b, const GemmRow* rows, Acc (*acc)[kPanelColumns]) {
    for (int64_t i = 0; i < b.size; i += kGroup) {
      const int64_t g = (b.k + i) / kGroup;
      I total[R][kPanelColumns];
      unroll<R>([&](auto r) SORTIE_INLINE {
        unroll<kPanelColumns>([&](auto j) SORTIE_INLINE {
          total[r.value][j.value] = Simd::load_bits(rows[r.value].x + g * kPrepared + 3 * kPlane);
        });
      });
      unroll<3>([&](auto d) SORTIE_INLINE {
        I sum[R][kPanelColumns];
        unroll<kVectors>([&](auto v) SORTIE_INLINE {
          I x[R];
          unroll<R>([&](auto r) SORTIE_INLINE {
            x[r.value] = held(Simd::load_bits(rows[r.value].x + g * kPrepared + d.value * kPlane +
                                              v.value * Simd::kBytes));
          });
          unroll<kPanelColumns>([&](auto j) SORTIE_INLINE {
            const I w = held(Simd::load_bits(b.w[j.value] + i + v.value * Simd::kBytes));
            unroll<R>([&](auto r) SORTIE_INLINE {
              const I product = Simd::dot_u8_s8(w, x[r.value]);
              I& to = sum[r.value][j.value];
              to = v.value == 0 ? product : Simd::add16(to, product);
            });
          });
        });
        unroll<R>([&](auto r) SORTIE_INLINE {
          unroll<kPanelColumns>([&](auto j) SORTIE_INLINE {
            I& to = total[r.value][j.value];
            to = Simd::add32(to, Simd::dot_16(sum[r.value][j.value], power_of_64(d.value)));
          });
        });
      });
      unroll<R>([&](auto r) SORTIE_INLINE {
        unroll<kPanelColumns>([&](auto j) SORTIE_INLINE {
          F& a = acc[r.value][j.value].sum;
          a = Simd::fma(Simd::to_float(total[r.value][j.value]),
                        Simd::set(b.scales[j.value][i / kGroup]), g == 0 ? Simd::zero() : a);
        });
      });
    }
  }

  // row.sum is what prepare returned: not 0 if there was a NaN.
  static void store(const Panel& /*panel*/, const GemmRow& row, int64_t n, int64_t columns,
                    const Acc (&a)[kPanelColumns]) {
    const __m128 y = Simd::half_sum(Simd::fold4(a[0].sum, a[1].sum, a[2].sum, a[3].sum));
    store_columns(row.out + n, _mm_mul_ps(y, _mm_set1_ps(row.sum == 0 ? row.scale : kNan)),
                  columns);
  }

  static int32_t prepare(const std::byte* codes, int64_t k, std::byte* out) {
    int32_t nan = 0;
    for (int64_t g = 0; g * kGroup < k; ++g, out += kPrepared) {
      int32_t too_much[kWidth] = {};
      for (int64_t v = 0; v < kVectors; ++v) {
        for (int64_t i = 0; i < Simd::kBytes; ++i) {
          const int64_t channel = g * kGroup + v / 2 * 2 * Simd::kBytes + 2 * i + v % 2;
          const auto code = channel < k ? static_cast<uint8_t>(codes[channel]) : uint8_t{0};
          const Digits& digits = kDigits.of[code];
          for (int64_t d = 0; d < 3; ++d) {
            out[d * kPlane + v * Simd::kBytes + i] =
                static_cast<std::byte>(static_cast<uint8_t>(digits.d[d]));
          }
          too_much[i / 4] -= 8 * digits.value;
          nan |= digits.nan ? 1 : 0;
        }
      }
      __builtin_memcpy(out + 3 * kPlane, too_much, sizeof too_much);
    }
    return nan;
  }
};

// ---- w8a8_int8

struct Int8Gemm {
  struct Acc {
    I sum;
  };
  static constexpr int kRows = Simd::kRowsInt8;
  static constexpr int kStreamed = 3;
  static constexpr int64_t kCodes = Simd::kBytes / 2;  // a vector of 16-bit codes
  static constexpr int64_t kBlock = 1024;
  static int64_t weight_bytes(int64_t k) { return k; }
  static I x(const GemmRow& row, int64_t k) { return Simd::load_bits(row.x + 2 * k); }

  template <int R>
  static void dot(const Panel& p, int64_t n, Acc (&acc)[R]) {
    const std::byte* w = p.w + n * p.w_stride;
    // Two chains a row; integer sums do not mind.
    I sum[R][2];
    unroll<R>([&](auto r) SORTIE_INLINE {
      sum[r.value][0] = Simd::zero_bits();
      sum[r.value][1] = Simd::zero_bits();
    });
    const auto step = [&](int64_t k, const std::byte* codes, auto chain) SORTIE_INLINE {
      const I weights = Simd::widen_s8(codes);
      unroll<R>([&](auto r) SORTIE_INLINE {
        I& to = sum[r.value][chain.value];
        to = Simd::add32(to, Simd::dot_16(weights, x(p.rows[r.value], k)));
      });
    };
    int64_t k = 0;
    for (; k + 64 <= p.k; k += 64) {
      prefetch_ahead(w + k);
      unroll<64 / kCodes>([&](auto i) SORTIE_INLINE {
        step(k + i.value * kCodes, w + k + i.value * kCodes, Index<i.value % 2>{});
      });
    }
    for (; k < p.k; k += kCodes) {
      std::byte space[kCodes];
      step(k, padded(w + k, p.k - k, kCodes, space), Index<0>{});
    }
    unroll<R>([&](auto r) SORTIE_INLINE {
      acc[r.value].sum = Simd::add32(sum[r.value][0], sum[r.value][1]);
    });
  }

  struct Block {
    int64_t k;
    int64_t size;
    alignas(64) int16_t w[kPanelColumns][kBlock];
    void load_column(const Panel& p, int j, int64_t n) {
      const std::byte* from = p.w + n * p.w_stride + k;
      for (int64_t i = 0; i < size; i += kCodes) {
        std::byte space[kCodes];
        Simd::store_bits(w[j] + i, Simd::widen_s8(padded(from + i, size - i, kCodes, space)));
      }
    }
  };

  template <int R>
  static void tile(const Block& b, const GemmRow* rows, Acc (*acc)[kPanelColumns]) {
    I a[R][kPanelColumns];
    unroll<R>([&](auto r) SORTIE_INLINE {
      unroll<kPanelColumns>([&](auto j) SORTIE_INLINE {
        a[r.value][j.value] = b.k == 0 ? Simd::zero_bits() : acc[r.value][j.value].sum;
      });
    });
    for (int64_t k = 0; k < b.size; k += kCodes) {
      I w[kPanelColumns];
      unroll<kPanelColumns>(
          [&](auto j) SORTIE_INLINE { w[j.value] = held(Simd::load_bits(b.w[j.value] + k)); });
      unroll<R>([&](auto r) SORTIE_INLINE {
        const I row = held(x(rows[r.value], b.k + k));
        unroll<kPanelColumns>([&](auto j) SORTIE_INLINE {
          a[r.value][j.value] = Simd::add32(a[r.value][j.value], Simd::dot_16(row, w[j.value]));
        });
      });
    }
    unroll<R>([&](auto r) SORTIE_INLINE {
      unroll<kPanelColumns>([&](auto j)
                                SORTIE_INLINE { acc[r.value][j.value].sum = a[r.value][j.value]; });
    });
  }

  static void store(const Panel& p, const GemmRow& row, int64_t n, int64_t columns,
                    const Acc (&a)[kPanelColumns]) {
    __m128i sum = Simd::half_sum(Simd::fold4(a[0].sum, a[1].sum, a[2].sum, a[3].sum));
    if (p.sum_bias != nullptr) {
      int32_t bias[kPanelColumns] = {};
      for (int64_t j = 0; j < columns; ++j) bias[j] = p.sum_bias[n + j];
      sum = _mm_add_epi32(sum, _mm_loadu_si128(reinterpret_cast<const __m128i*>(bias)));
    }
    float scales[kPanelColumns] = {};
    for (int64_t j = 0; j < columns; ++j) scales[j] = static_cast<const float*>(p.w_scales)[n + j];
    const __m128 y = _mm_mul_ps(_mm_cvtepi32_ps(sum), _mm_set1_ps(row.scale));
    store_columns(row.out + n, _mm_mul_ps(y, _mm_loadu_ps(scales)), columns);
  }
};

// ---- the walk

template <typename G, int kRows>
void stream_rows(const Panel& p) {
  using Acc = typename G::Acc;
  for (int64_t n = p.n_begin; n < p.n_end; n += kPanelColumns) {
    const int64_t columns = p.n_end - n < kPanelColumns ? p.n_end - n : kPanelColumns;
    Acc done[kPanelColumns][kRows] = {};
    for (int64_t j = 0; j < columns; ++j) G::template dot<kRows>(p, n + j, done[j]);
    for (int r = 0; r < kRows; ++r) {
      const Acc row[kPanelColumns] = {done[0][r], done[1][r], done[2][r], done[3][r]};
      G::store(p, p.rows[r], n, columns, row);
    }
  }
}

template <typename G, int kRows>
void stream_of(const Panel& p) {
  if (p.count == kRows) {
    stream_rows<G, kRows>(p);
  } else if constexpr (kRows > 1) {
    stream_of<G, kRows - 1>(p);
  }
}

template <typename G, int kRows>
void tile_of(const typename G::Block& block, const GemmRow* rows, int64_t left,
             typename G::Acc (*acc)[kPanelColumns]) {
  if (left >= kRows) {
    G::template tile<kRows>(block, rows, acc);
  } else if constexpr (kRows > 1) {
    tile_of<G, kRows - 1>(block, rows, left, acc);
  }
}

// The weights that come after the block at (n, k): the next columns', if there are any.
template <typename G>
void prefetch_block(const Panel& p, int64_t n, int64_t k, int64_t size) {
  for (int64_t j = n; j < n + kPanelColumns && j < p.n_end; ++j) {
    const std::byte* w = p.w + j * p.w_stride + G::weight_bytes(k);
    for (int64_t i = 0; i < G::weight_bytes(size); i += 64) _mm_prefetch(w + i, _MM_HINT_T1);
  }
}

template <typename G>
void run_panel(const Panel& p) {
  if (p.count <= G::kStreamed) return stream_of<G, G::kStreamed>(p);
  typename G::Block block;
  typename G::Acc acc[kPanelRows][kPanelColumns];
  for (int64_t n = p.n_begin; n < p.n_end; n += kPanelColumns) {
    const int64_t columns = p.n_end - n < kPanelColumns ? p.n_end - n : kPanelColumns;
    for (int64_t k = 0; k < p.k; k += G::kBlock) {
      block.k = k;
      block.size = p.k - k < G::kBlock ? p.k - k : G::kBlock;
      prefetch_block<G>(p, n + kPanelColumns, k, block.size);
      // Columns past the end repeat the last one and are not stored.
      for (int j = 0; j < kPanelColumns; ++j)
        block.load_column(p, j, n + (j < columns ? j : columns - 1));
      for (int64_t r = 0; r < p.count; r += G::kRows)
        tile_of<G, G::kRows>(block, p.rows + r, p.count - r, acc + r);
    }
    for (int64_t r = 0; r < p.count; ++r) G::store(p, p.rows[r], n, columns, acc[r]);
  }
}

void gemm(const Panel& p) {
  switch (p.format) {
    case Format::kF32:
      return run_panel<F32Gemm<F32Weights>>(p);
    case Format::kBf16:
      return run_panel<F32Gemm<Bf16Weights>>(p);
    case Format::kFp8Block:
      return run_panel<Fp8Gemm>(p);
    case Format::kW4Afp8:
      return run_panel<Int4Gemm>(p);
    case Format::kW8A8Int8:
      return run_panel<Int8Gemm>(p);
  }
}

int64_t prepared_bytes(Format format, int64_t k) {
  switch (format) {
    case Format::kBf16:
      return 4 * round_up(k, kStep);
    case Format::kFp8Block:
      return 4 * round_up(k, kGroup);
    case Format::kW4Afp8:
      return round_up(k, kGroup) / kGroup * Int4Gemm::kPrepared;
    case Format::kW8A8Int8:
      return 2 * round_up(k, kGroup);
    default:
      return 0;
  }
}

// Each step's even channels, then its odd ones.
void prepare_bf16(const float* x, int64_t k, float* out) {
  for (int64_t i = 0; i < k; i += kStep) {
    for (int64_t j = 0; j < kWidth; ++j) {
      const int64_t at = i + 2 * j;
      out[i + j] = at < k ? x[at] : 0;
      out[i + kWidth + j] = at + 1 < k ? x[at + 1] : 0;
    }
  }
}

void prepare_fp8(const std::byte* codes, int64_t k, float* out) {
  const F scale = Simd::set(kHalfScale * kHalfScale);  // its own, and the weights'
  for (int64_t i = 0; i < k; i += kGroup) {
    std::byte space[kGroup];
    const std::byte* group = padded(codes + i, k - i, kGroup, space);
    for (int64_t c = 0; c < kGroup; c += kStep) {
      const I halves = e4m3_halves(group + c);
      Simd::store(out + i + c, Simd::mul(Simd::widen_half(halves, 0), scale));
      Simd::store(out + i + c + kWidth, Simd::mul(Simd::widen_half(halves, 1), scale));
    }
    if (!has_nan(group)) continue;
    for (int64_t c = 0; c < kGroup; ++c) {
      if ((static_cast<uint8_t>(group[c]) & 0x7fU) == 0x7fU) out[i + c] = kNan;
    }
  }
}

void prepare_int8(const std::byte* codes, int64_t k, std::byte* out) {
  for (int64_t i = 0; i < k; i += Int8Gemm::kCodes) {
    std::byte space[Int8Gemm::kCodes];
    Simd::store_bits(out + 2 * i,
                     Simd::widen_s8(padded(codes + i, k - i, Int8Gemm::kCodes, space)));
  }
}

int32_t prepare(Format format, const std::byte* codes, int64_t k, std::byte* out) {
  switch (format) {
    case Format::kBf16:
      prepare_bf16(reinterpret_cast<const float*>(codes), k, reinterpret_cast<float*>(out));
      return 0;
    case Format::kFp8Block:
      prepare_fp8(codes, k, reinterpret_cast<float*>(out));
      return 0;
    case Format::kW4Afp8:
      return Int4Gemm::prepare(codes, k, out);
    case Format::kW8A8Int8:
      prepare_int8(codes, k, out);
      return 0;
    default:
      return 0;
  }
}

}  // namespace
}  // namespace sortie::cpu
