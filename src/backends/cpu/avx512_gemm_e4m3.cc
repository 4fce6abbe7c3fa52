// fp8_block and w4afp8: weights of at most 4 significant bits on e4m3 activations. Both are exact
// in bf16, so vdpbf16ps loses nothing; and it may flush subnormals, since every product and sum is
// a multiple of 2^-18. A group of 128 channels is summed from zero lane by lane, then
// acc = fma(group sum, scale, acc), groups ascending; lanes are added last.
//
// Both sides stand in the order that unpacking a weight costs least in; `prepare` brings
// activations into it once.
#include "backends/cpu/avx512_gemm.h"

namespace sortie::cpu {
namespace {

using quant::kGroup;

constexpr int kVectors = 4;  // of 32 bf16 in a group

// The bf16 bits of an e4m3 code without its sign.
constexpr uint16_t bf16_of_e4m3(unsigned code) {
  const unsigned exponent = code >> 3;
  const unsigned mantissa = code & 7U;
  if (code == 0x7fU) return 0x7fc0;
  if (exponent != 0) return static_cast<uint16_t>(((exponent + 120U) << 7) | (mantissa << 4));
  if (mantissa == 0) return 0;
  unsigned top = 2;  // subnormal: mantissa * 2^-9
  while ((mantissa >> top) == 0) --top;
  return static_cast<uint16_t>(((118U + top) << 7) | ((mantissa - (1U << top)) << (7U - top)));
}

struct E4m3Tables {
  alignas(64) uint8_t low[128];
  alignas(64) uint8_t high[128];
};
constexpr E4m3Tables make_e4m3_tables() {
  E4m3Tables t{};
  for (unsigned c = 0; c < 128; ++c) {
    t.low[c] = static_cast<uint8_t>(bf16_of_e4m3(c) & 0xffU);
    t.high[c] = static_cast<uint8_t>(bf16_of_e4m3(c) >> 8);
  }
  return t;
}
constexpr E4m3Tables kE4m3 = make_e4m3_tables();

// bf16 of the int4 codes in the low 4 bits of an index; bit 4 is ignored.
struct Int4Table {
  alignas(64) uint16_t bits[32];
};
constexpr Int4Table make_int4_table() {
  constexpr uint16_t kBits[16] = {0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                  0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};
  Int4Table t{};
  for (unsigned i = 0; i < 32; ++i) t.bits[i] = kBits[i % 16];
  return t;
}
constexpr Int4Table kInt4 = make_int4_table();

// Where an activation's code must stand so that, after widen_e4m3, word i of vector j of a group is
// channel 4i + j: the order in which the nibbles of 16-bit words come out.
struct Int4Order {
  alignas(64) uint8_t at[2][64];
};
constexpr Int4Order make_int4_order() {
  Int4Order o{};
  for (unsigned pair = 0; pair < 2; ++pair) {
    for (unsigned i = 0; i < 64; ++i) {
      const unsigned word = i / 16 * 8 + i % 8;
      const unsigned vector = 2 * pair + (i % 16) / 8;
      o.at[pair][i] = static_cast<uint8_t>(4 * word + vector);
    }
  }
  return o;
}
constexpr Int4Order kInt4Order = make_int4_order();

inline __m512i table(const uint8_t* bytes) { return _mm512_load_si512(bytes); }

// 64 codes -> 64 bf16: bytes 0-7 of each 128-bit lane go to `first`, bytes 8-15 to `second`.
inline void widen_e4m3(__m512i codes, __m512i* first, __m512i* second) {
  // The table lookups take 7 bits of an index and so ignore the sign.
  const __m512i low = _mm512_permutex2var_epi8(table(kE4m3.low), codes, table(kE4m3.low + 64));
  const __m512i high = _mm512_permutex2var_epi8(table(kE4m3.high), codes, table(kE4m3.high + 64));
  // high | (codes & 0x80)
  const __m512i sign = _mm512_ternarylogic_epi64(high, codes, _mm512_set1_epi8(-128), 0xf8);
  *first = _mm512_unpacklo_epi8(low, sign);
  *second = _mm512_unpackhi_epi8(low, sign);
}

inline __m512i load_bytes(const std::byte* p, int64_t count) {
  if (count >= 64) return _mm512_loadu_si512(p);
  return count <= 0 ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi8((1ULL << count) - 1U, p);
}

struct Fp8Weights {
  static constexpr int64_t kGroupBytes = kGroup;
  static constexpr bool kScaleOfRow = true;  // the activation's scale is a part of the group's
  static void unpack(const std::byte* w, int64_t channels, __m512i (&out)[kVectors]) {
    widen_e4m3(load_bytes(w, channels), &out[0], &out[1]);
    widen_e4m3(load_bytes(w + 64, channels - 64), &out[2], &out[3]);
  }
  // Scales of up to 16 groups from `g` on.
  static void scales(const Panel& p, int64_t n, int64_t g, int64_t count, float* out) {
    const int64_t groups = (p.k + kGroup - 1) / kGroup;
    const float* from = static_cast<const float*>(p.w_scales) + n / kGroup * groups + g;
    _mm512_store_ps(out, _mm512_maskz_loadu_ps(static_cast<__mmask16>((1U << count) - 1U), from));
  }
};

struct Int4Weights {
  static constexpr int64_t kGroupBytes = kGroup / 2;
  static constexpr bool kScaleOfRow = false;
  static void unpack(const std::byte* w, int64_t channels, __m512i (&out)[kVectors]) {
    const __m512i v = load_bytes(w, (channels + 1) / 2);
    const __m512i bits = _mm512_load_si512(kInt4.bits);
    out[0] = _mm512_permutexvar_epi16(v, bits);
    out[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 4), bits);
    out[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 8), bits);
    out[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 12), bits);
  }
  static void scales(const Panel& p, int64_t n, int64_t g, int64_t count, float* out) {
    const int64_t groups = (p.k + kGroup - 1) / kGroup;
    const uint16_t* from = static_cast<const uint16_t*>(p.w_scales) + n * groups + g;
    const __m256i bits = _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1U << count) - 1U), from);
    _mm512_store_si512(out, _mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
};

template <typename W>
struct GroupGemm {
  struct Acc {
    __m512 sum;
  };
  static constexpr bool kFromMemory = true;
  static constexpr int kRows = 3;
  static constexpr int kStreamed = 3;
  static constexpr int64_t kBlock = 8 * kGroup;
  static constexpr int64_t kScales = 16;
  static int64_t weight_bytes(int64_t k) { return k * W::kGroupBytes / kGroup; }

  static const uint16_t* x(const GemmRow& row, int64_t group) {
    return reinterpret_cast<const uint16_t*>(row.x) + group * kGroup;
  }
  static __m512i vector(const uint16_t* x, int i) { return _mm512_loadu_si512(x + 32 * i); }
  static __m512 group_scale(const GemmRow& row, int64_t g, float weight_scale) {
    return _mm512_set1_ps(W::kScaleOfRow ? row.scales[g] * weight_scale : weight_scale);
  }

  template <int R>
  static void dot(const Panel& p, int64_t n, Acc (&acc)[R]) {
    const std::byte* w = p.w + n * p.w_stride;
    __m512 a[R];
    unroll<R>([&](auto r) SORTIE_INLINE { a[r.value] = acc[r.value].sum; });
    const int64_t groups = (p.k + kGroup - 1) / kGroup;
    for (int64_t first = 0; first < groups; first += kScales) {
      const int64_t count = groups - first < kScales ? groups - first : kScales;
      alignas(64) float scales[kScales];
      W::scales(p, n, first, count, scales);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t g = first + i;
        __m512i codes[kVectors];
        for (int64_t line = 0; line < W::kGroupBytes; line += 64)
          prefetch_ahead(w + g * W::kGroupBytes + line);
        W::unpack(w + g * W::kGroupBytes, p.k - g * kGroup, codes);
        unroll<R>([&](auto r) SORTIE_INLINE {
          const uint16_t* in = x(p.rows[r.value], g);
          __m512 sum = _mm512_setzero_ps();
          unroll<kVectors>([&](auto v) SORTIE_INLINE {
            sum = dot_bf16(sum, codes[v.value], vector(in, v.value));
          });
          const __m512 scale = group_scale(p.rows[r.value], g, scales[i]);
          a[r.value] = _mm512_fmadd_ps(sum, scale, a[r.value]);
        });
      }
    }
    unroll<R>([&](auto r) SORTIE_INLINE { acc[r.value].sum = a[r.value]; });
  }

  struct Block {
    int64_t group;
    int64_t groups;
    alignas(64) uint16_t w[kPanelColumns][kBlock];
    alignas(64) float scales[kPanelColumns][kScales];

    void load(const Panel& p, int64_t n, int64_t columns, int64_t begin, int64_t count) {
      group = begin / kGroup;
      groups = (count + kGroup - 1) / kGroup;
      for (int64_t j = 0; j < kPanelColumns; ++j) {
        const int64_t column = n + (j < columns ? j : columns - 1);
        const std::byte* row = p.w + column * p.w_stride + group * W::kGroupBytes;
        W::scales(p, column, group, groups, scales[j]);
        for (int64_t g = 0; g < groups; ++g) {
          __m512i codes[kVectors];
          W::unpack(row + g * W::kGroupBytes, count - g * kGroup, codes);
          for (int v = 0; v < kVectors; ++v)
            _mm512_store_si512(w[j] + g * kGroup + 32 * v, codes[v]);
        }
      }
    }
  };

  template <int R>
  static void tile(const Panel& /*panel*/, const Block& b, const GemmRow* rows,
                   Acc (*acc)[kPanelColumns]) {
    __m512 a[R][kPanelColumns];
    unroll<R>([&](auto r) SORTIE_INLINE {
      unroll<kPanelColumns>([&](auto j) SORTIE_INLINE {
        a[r.value][j.value] = b.group == 0 ? _mm512_setzero_ps() : acc[r.value][j.value].sum;
      });
    });
    for (int64_t g = 0; g < b.groups; ++g) {
      __m512 sum[R][kPanelColumns];
      unroll<kVectors>([&](auto v) SORTIE_INLINE {
        __m512i w[kPanelColumns];
        unroll<kPanelColumns>([&](auto j) SORTIE_INLINE {
          w[j.value] = held(_mm512_load_si512(b.w[j.value] + g * kGroup + 32 * v.value));
        });
        unroll<R>([&](auto r) SORTIE_INLINE {
          const __m512i row = held(vector(x(rows[r.value], b.group + g), v.value));
          unroll<kPanelColumns>([&](auto j) SORTIE_INLINE {
            const __m512 from = v.value == 0 ? _mm512_setzero_ps() : sum[r.value][j.value];
            sum[r.value][j.value] = dot_bf16(from, w[j.value], row);
          });
        });
      });
      unroll<R>([&](auto r) SORTIE_INLINE {
        // The columns of a tile lie in one block of 128.
        const __m512 common = group_scale(rows[r.value], b.group + g, b.scales[0][g]);
        unroll<kPanelColumns>([&](auto j) SORTIE_INLINE {
          const __m512 scale = W::kScaleOfRow ? common : _mm512_set1_ps(b.scales[j.value][g]);
          a[r.value][j.value] = _mm512_fmadd_ps(sum[r.value][j.value], scale, a[r.value][j.value]);
        });
      });
    }
    unroll<R>([&](auto r) SORTIE_INLINE {
      unroll<kPanelColumns>([&](auto j)
                                SORTIE_INLINE { acc[r.value][j.value].sum = a[r.value][j.value]; });
    });
  }

  static void store(const Panel& /*panel*/, const GemmRow& row, int64_t n, int64_t columns,
                    const Acc (&a)[kPanelColumns]) {
    __m128 y = lane_sums(a[0].sum, a[1].sum, a[2].sum, a[3].sum);
    if (!W::kScaleOfRow) y = _mm_mul_ps(y, _mm_set1_ps(row.scale));
    store_columns(row.out + n, y, columns);
  }
};

int32_t prepare_int8(const std::byte* codes, int64_t k, std::byte* out) {
  __m512i sum = _mm512_setzero_si512();
  for (int64_t i = 0; i < k; i += kGroup) {
    for (int64_t j = i; j < i + kGroup; j += 64) {
      const __m512i v = load_bytes(codes + j, k - j);
      sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), v);
      _mm512_storeu_si512(out + j, v);
    }
  }
  return _mm512_reduce_add_epi32(sum);
}

}  // namespace

int32_t avx512_prepare(quant::Format format, const std::byte* codes, int64_t k, std::byte* out) {
  if (format == quant::Format::kW8A8Int8) return prepare_int8(codes, k, out);
  if (format == quant::Format::kBf16) {
    avx512_prepare_f32(reinterpret_cast<const float*>(codes), k, reinterpret_cast<float*>(out));
    return 0;
  }
  for (int64_t i = 0; i < k; i += kGroup, out += 2 * kGroup) {
    __m512i a = load_bytes(codes + i, k - i);
    __m512i b = load_bytes(codes + i + 64, k - i - 64);
    if (format == quant::Format::kW4Afp8) {
      const __m512i first = _mm512_permutex2var_epi8(a, table(kInt4Order.at[0]), b);
      b = _mm512_permutex2var_epi8(a, table(kInt4Order.at[1]), b);
      a = first;
    }
    __m512i v[kVectors];
    widen_e4m3(a, &v[0], &v[1]);
    widen_e4m3(b, &v[2], &v[3]);
    for (int j = 0; j < kVectors; ++j) _mm512_storeu_si512(out + 64 * j, v[j]);
  }
  return 0;
}

void avx512_gemm_fp8_block(const Panel& p) { run_panel<GroupGemm<Fp8Weights>>(p); }
void avx512_gemm_w4afp8(const Panel& p) { run_panel<GroupGemm<Int4Weights>>(p); }

}  // namespace sortie::cpu
