// The quantised formats on packed weights (tiles.h): a vector's lanes are 16 columns, a tile is 4
// vectors wide, activations are broadcast.
//
// fp8_block and w4afp8: weights of at most 4 significant bits on e4m3 activations. Both are exact
// in bf16, so vdpbf16ps loses nothing; and it may flush subnormals, since every product and sum is
// a multiple of 2^-18. Of the 64 pairs of channels of a group the even and the odd ones are summed
// from zero by themselves (two chains hide the latency for a single row), then
// acc = fma(even + odd, scale, acc), groups ascending.
//
// w8a8_int8: exact int32 sums with vpdpbusd, which takes one side unsigned: weights are packed with
// +128, and 128 * sum(x) is taken off at the end. k * 255 * 127 fits up to k = 66,000.
//
// One or two rows: weights are the traffic, unpacked on the fly in one sequential stream. Nothing
// is prefetched by hand: at one row, of the read bandwidth beside it, w4afp8 reached 77 % with 8 KB
// ahead into the second level, 97 % into the first, 108 % without. More rows: a group is unpacked
// once into 16 KB of the first-level cache for all rows, six at a time (24 sums in registers). Both
// forms do the same sums in the same order.
#include "backends/cpu/avx512_gemm.h"

namespace sortie::cpu {
namespace {

using quant::kGroup;

constexpr int kVectors = 4;   // of 16 columns
constexpr int kPairs = 64;    // of channels in a group
constexpr int kTileRows = 6;  // of the register tile
constexpr int kStreamed = 2;  // rows up to which weights are streamed

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

inline __m512i table(const uint8_t* bytes) { return _mm512_load_si512(bytes); }

// 64 codes -> 64 bf16: bytes 0-7 of each 128-bit lane go to `first`, bytes 8-15 to `second`.
SORTIE_INLINE inline void widen_e4m3(__m512i codes, __m512i* first, __m512i* second) {
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

inline __m512i broadcast(const std::byte* four) {
  int32_t v;
  __builtin_memcpy(&v, four, sizeof v);
  return _mm512_set1_epi32(v);
}

// Columns [column, n_end) of a row, at most 16.
SORTIE_INLINE inline void store_lanes(float* out, int64_t left, __m512 y) {
  if (left >= 16) {
    _mm512_storeu_ps(out, y);
  } else if (left > 0) {
    _mm512_mask_storeu_ps(out, static_cast<__mmask16>((1U << left) - 1U), y);
  }
}

struct Fp8Tile {
  static constexpr int64_t kPairBytes = 128;
  static constexpr int64_t kGroupBytes = kPairs * kPairBytes;
  static constexpr bool kRowScale = false;
  SORTIE_INLINE static void unpack(const std::byte* w, __m512i (&out)[kVectors]) {
    widen_e4m3(_mm512_loadu_si512(w), &out[0], &out[1]);
    widen_e4m3(_mm512_loadu_si512(w + 64), &out[2], &out[3]);
  }
  // A block's scale is the same for all columns of a tile; the activation's is a part of it.
  struct Scales {
    float block;
  };
  SORTIE_INLINE static Scales scales(const Panel& p, const std::byte* /*group*/, int64_t n,
                                     int64_t g) {
    const int64_t groups = (p.k + kGroup - 1) / kGroup;
    return {static_cast<const float*>(p.w_scales)[n / kGroup * groups + g]};
  }
  SORTIE_INLINE static __m512 scale(const Scales& s, const GemmRow& row, int64_t g, int /*v*/) {
    return _mm512_set1_ps(row.scales[g] * s.block);
  }
};

struct Int4Tile {
  static constexpr int64_t kPairBytes = 64;
  static constexpr int64_t kGroupBytes = kPairs * kPairBytes + 2 * kTileColumns;
  static constexpr bool kRowScale = true;
  SORTIE_INLINE static void unpack(const std::byte* w, __m512i (&out)[kVectors]) {
    const __m512i v = _mm512_loadu_si512(w);
    const __m512i bits = _mm512_load_si512(kInt4.bits);
    out[0] = _mm512_permutexvar_epi16(v, bits);
    out[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 4), bits);
    out[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 8), bits);
    out[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 12), bits);
  }
  struct Scales {
    __m512 column[kVectors];
  };
  SORTIE_INLINE static Scales scales(const Panel& /*p*/, const std::byte* group, int64_t /*n*/,
                                     int64_t /*g*/) {
    const std::byte* at = group + kPairs * kPairBytes;
    Scales s;
    unroll<kVectors>([&](auto v) SORTIE_INLINE {
      const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at) + v.value);
      s.column[v.value] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    });
    return s;
  }
  SORTIE_INLINE static __m512 scale(const Scales& s, const GemmRow& /*row*/, int64_t /*g*/, int v) {
    return s.column[v];
  }
};

template <typename W>
SORTIE_INLINE inline void store_row(const Panel& p, const GemmRow& row, int64_t n,
                                    const __m512 (&acc)[kVectors]) {
  unroll<kVectors>([&](auto v) SORTIE_INLINE {
    const __m512 y =
        W::kRowScale ? _mm512_mul_ps(acc[v.value], _mm512_set1_ps(row.scale)) : acc[v.value];
    store_lanes(row.out + n + 16 * v.value, p.n_end - n - 16 * v.value, y);
  });
}

// R rows against one tile, unpacked on the fly.
template <typename W, int R>
void stream_groups(const Panel& p, const std::byte* w, int64_t n) {
  __m512 acc[R][kVectors] = {};
  const int64_t groups = (p.k + kGroup - 1) / kGroup;
  for (int64_t g = 0; g < groups; ++g, w += W::kGroupBytes) {
    __m512 sum[2][R][kVectors];
    unroll<2>([&](auto c) SORTIE_INLINE {
      unroll<R>([&](auto r) SORTIE_INLINE {
        unroll<kVectors>(
            [&](auto v) SORTIE_INLINE { sum[c.value][r.value][v.value] = _mm512_setzero_ps(); });
      });
    });
    const std::byte* x[R];
    unroll<R>([&](auto r) SORTIE_INLINE { x[r.value] = p.rows[r.value].x + 2 * kGroup * g; });
    for (int64_t pair = 0; pair < kPairs; pair += 2) {
      unroll<2>([&](auto c) SORTIE_INLINE {
        __m512i weights[kVectors];
        W::unpack(w + (pair + c.value) * W::kPairBytes, weights);
        unroll<R>([&](auto r) SORTIE_INLINE {
          const __m512i in = held(broadcast(x[r.value] + 4 * (pair + c.value)));
          unroll<kVectors>([&](auto v) SORTIE_INLINE {
            __m512& to = sum[c.value][r.value][v.value];
            to = dot_bf16(to, weights[v.value], in);
          });
        });
      });
    }
    const typename W::Scales scales = W::scales(p, w, n, g);
    unroll<R>([&](auto r) SORTIE_INLINE {
      unroll<kVectors>([&](auto v) SORTIE_INLINE {
        const __m512 total = _mm512_add_ps(sum[0][r.value][v.value], sum[1][r.value][v.value]);
        acc[r.value][v.value] = _mm512_fmadd_ps(
            total, W::scale(scales, p.rows[r.value], g, v.value), acc[r.value][v.value]);
      });
    });
  }
  unroll<R>([&](auto r) SORTIE_INLINE { store_row<W>(p, p.rows[r.value], n, acc[r.value]); });
}

// A group of a tile in bf16, even pairs and odd pairs.
struct Group {
  alignas(64) __m512i w[2][kPairs / 2][kVectors];
};

template <int R>
SORTIE_INLINE inline void half_sums(const Group& group, int chain, const std::byte* const (&x)[R],
                                    __m512 (&sum)[R][kVectors]) {
  unroll<R>([&](auto r) SORTIE_INLINE {
    unroll<kVectors>([&](auto v) SORTIE_INLINE { sum[r.value][v.value] = _mm512_setzero_ps(); });
  });
  for (int64_t i = 0; i < kPairs / 2; ++i) {
    __m512i w[kVectors];
    unroll<kVectors>([&](auto v) SORTIE_INLINE { w[v.value] = held(group.w[chain][i][v.value]); });
    unroll<R>([&](auto r) SORTIE_INLINE {
      const __m512i in = held(broadcast(x[r.value] + 8 * i + 4 * chain));
      unroll<kVectors>([&](auto v) SORTIE_INLINE {
        sum[r.value][v.value] = dot_bf16(sum[r.value][v.value], w[v.value], in);
      });
    });
  }
}

// R rows against a group; acc stands in the first-level cache.
template <typename W, int R>
void group_rows(const Group& group, const typename W::Scales& scales, int64_t g,
                const GemmRow* rows, __m512 (*acc)[kVectors]) {
  const std::byte* x[R];
  unroll<R>([&](auto r) SORTIE_INLINE { x[r.value] = rows[r.value].x + 2 * kGroup * g; });
  __m512 even[R][kVectors];
  {
    __m512 sum[R][kVectors];
    half_sums<R>(group, 0, x, sum);
    unroll<R>([&](auto r) SORTIE_INLINE {
      unroll<kVectors>([&](auto v)
                           SORTIE_INLINE { even[r.value][v.value] = sum[r.value][v.value]; });
    });
    asm volatile("" : : "r"(&even[0][0]) : "memory");  // out of the registers
  }
  __m512 odd[R][kVectors];
  half_sums<R>(group, 1, x, odd);
  unroll<R>([&](auto r) SORTIE_INLINE {
    unroll<kVectors>([&](auto v) SORTIE_INLINE {
      const __m512 total = _mm512_add_ps(even[r.value][v.value], odd[r.value][v.value]);
      __m512& to = acc[r.value][v.value];
      to = _mm512_fmadd_ps(total, W::scale(scales, rows[r.value], g, v.value), to);
    });
  });
}

template <typename W, int R>
void group_rows_of(const Group& group, const typename W::Scales& scales, int64_t g,
                   const GemmRow* rows, int64_t left, __m512 (*acc)[kVectors]) {
  if (left >= R) {
    group_rows<W, R>(group, scales, g, rows, acc);
  } else if constexpr (R > 1) {
    group_rows_of<W, R - 1>(group, scales, g, rows, left, acc);
  }
}

template <typename W>
void blocked_groups(const Panel& p, const std::byte* w, int64_t n) {
  alignas(64) __m512 acc[kPanelRows][kVectors];
  Group group;
  for (int64_t r = 0; r < p.count; ++r) {
    unroll<kVectors>([&](auto v) SORTIE_INLINE { acc[r][v.value] = _mm512_setzero_ps(); });
  }
  const int64_t groups = (p.k + kGroup - 1) / kGroup;
  for (int64_t g = 0; g < groups; ++g, w += W::kGroupBytes) {
    for (int64_t pair = 0; pair < kPairs; ++pair) {
      // The next group, while this one is multiplied.
      for (int64_t line = 0; line < W::kPairBytes; line += 64) {
        _mm_prefetch(w + W::kGroupBytes + pair * W::kPairBytes + line, _MM_HINT_T1);
      }
      W::unpack(w + pair * W::kPairBytes, group.w[pair % 2][pair / 2]);
    }
    const typename W::Scales scales = W::scales(p, w, n, g);
    for (int64_t r = 0; r < p.count; r += kTileRows) {
      group_rows_of<W, kTileRows>(group, scales, g, p.rows + r, p.count - r, acc + r);
    }
  }
  for (int64_t r = 0; r < p.count; ++r) store_row<W>(p, p.rows[r], n, acc[r]);
}

// ---- int8

constexpr int64_t kQuadBytes = 4 * kTileColumns;
constexpr int64_t kQuads = 64;  // of a block of 16 KB

SORTIE_INLINE inline void store_int8(const Panel& p, const GemmRow& row, int64_t n,
                                     const __m512i (&sum)[kVectors]) {
  const __m512i offset = _mm512_set1_epi32(128 * row.sum);
  unroll<kVectors>([&](auto v) SORTIE_INLINE {
    const int64_t left = p.n_end - n - 16 * v.value;
    if (left <= 0) return;
    const auto mask = static_cast<__mmask16>(left >= 16 ? 0xffffU : (1U << left) - 1U);
    const float* scales = static_cast<const float*>(p.w_scales) + n + 16 * v.value;
    __m512i exact = _mm512_sub_epi32(sum[v.value], offset);
    if (p.sum_bias != nullptr) {
      exact =
          _mm512_add_epi32(exact, _mm512_maskz_loadu_epi32(mask, p.sum_bias + n + 16 * v.value));
    }
    const __m512 y = _mm512_mul_ps(_mm512_cvtepi32_ps(exact), _mm512_set1_ps(row.scale));
    store_lanes(row.out + n + 16 * v.value, left,
                _mm512_mul_ps(y, _mm512_maskz_loadu_ps(mask, scales)));
  });
}

template <int R, bool kAhead>
SORTIE_INLINE inline void add_quads(const std::byte* w, int64_t quads,
                                    const std::byte* const (&x)[R], __m512i (&sum)[R][kVectors],
                                    int64_t ahead) {
  for (int64_t q = 0; q < quads; ++q, w += kQuadBytes) {
    __m512i weights[kVectors];
    unroll<kVectors>([&](auto v) SORTIE_INLINE {
      if (kAhead) _mm_prefetch(w + 64 * v.value + ahead, _MM_HINT_T1);
      weights[v.value] = held(_mm512_loadu_si512(w + 64 * v.value));
    });
    unroll<R>([&](auto r) SORTIE_INLINE {
      const __m512i in = held(broadcast(x[r.value] + 4 * q));
      unroll<kVectors>([&](auto v) SORTIE_INLINE {
        sum[r.value][v.value] = dot_int8(sum[r.value][v.value], weights[v.value], in);
      });
    });
  }
}

template <int R>
void stream_quads(const Panel& p, const std::byte* w, int64_t n) {
  __m512i sum[R][kVectors];
  const std::byte* x[R];
  unroll<R>([&](auto r) SORTIE_INLINE {
    x[r.value] = p.rows[r.value].x;
    unroll<kVectors>([&](auto v) SORTIE_INLINE { sum[r.value][v.value] = _mm512_setzero_si512(); });
  });
  add_quads<R, false>(w, (p.k + 3) / 4, x, sum, 0);
  unroll<R>([&](auto r) SORTIE_INLINE { store_int8(p, p.rows[r.value], n, sum[r.value]); });
}

template <int R, bool kAhead>
void quad_rows(const std::byte* w, int64_t first, int64_t quads, const GemmRow* rows,
               __m512i (*acc)[kVectors]) {
  __m512i sum[R][kVectors];
  const std::byte* x[R];
  unroll<R>([&](auto r) SORTIE_INLINE {
    x[r.value] = rows[r.value].x + 4 * first;
    unroll<kVectors>([&](auto v) SORTIE_INLINE {
      sum[r.value][v.value] = first == 0 ? _mm512_setzero_si512() : acc[r.value][v.value];
    });
  });
  add_quads<R, kAhead>(w, quads, x, sum, kQuads * kQuadBytes);
  unroll<R>([&](auto r) SORTIE_INLINE {
    unroll<kVectors>([&](auto v) SORTIE_INLINE { acc[r.value][v.value] = sum[r.value][v.value]; });
  });
}

template <int R, bool kAhead>
void quad_rows_of(const std::byte* w, int64_t first, int64_t quads, const GemmRow* rows,
                  int64_t left, __m512i (*acc)[kVectors]) {
  if (left >= R) {
    quad_rows<R, kAhead>(w, first, quads, rows, acc);
  } else if constexpr (R > 1) {
    quad_rows_of<R - 1, kAhead>(w, first, quads, rows, left, acc);
  }
}

void blocked_quads(const Panel& p, const std::byte* w, int64_t n) {
  alignas(64) __m512i acc[kPanelRows][kVectors];
  const int64_t quads = (p.k + 3) / 4;
  for (int64_t q = 0; q < quads; q += kQuads, w += kQuads * kQuadBytes) {
    const int64_t count = quads - q < kQuads ? quads - q : kQuads;
    quad_rows_of<kTileRows, true>(w, q, count, p.rows, p.count, acc);
    for (int64_t r = kTileRows; r < p.count; r += kTileRows) {
      quad_rows_of<kTileRows, false>(w, q, count, p.rows + r, p.count - r, acc + r);
    }
  }
  for (int64_t r = 0; r < p.count; ++r) store_int8(p, p.rows[r], n, acc[r]);
}

// fn(tile, its first column) for each tile of the panel.
template <typename F>
SORTIE_INLINE inline void each_tile(const Panel& p, const F& fn) {
  for (int64_t n = p.n_begin; n < p.n_end; n += kTileColumns) {
    fn(p.w + n / kTileColumns * p.w_stride, n);
  }
}

template <typename W>
void gemm_groups(const Panel& p) {
  each_tile(p, [&](const std::byte* w, int64_t n) {
    if (p.count == 1) {
      stream_groups<W, 1>(p, w, n);
    } else if (p.count == kStreamed) {
      stream_groups<W, kStreamed>(p, w, n);
    } else {
      blocked_groups<W>(p, w, n);
    }
  });
}

void gemm_int8(const Panel& p) {
  each_tile(p, [&](const std::byte* w, int64_t n) {
    if (p.count == 1) {
      stream_quads<1>(p, w, n);
    } else if (p.count == kStreamed) {
      stream_quads<kStreamed>(p, w, n);
    } else {
      blocked_quads(p, w, n);
    }
  });
}

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
  // widen_e4m3 takes the halves of each 128-bit lane apart; this order puts them together again.
  const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
  const int64_t padded = (k + kGroup - 1) / kGroup * kGroup;
  for (int64_t i = 0; i < padded; i += 64, out += 128) {
    __m512i first;
    __m512i second;
    widen_e4m3(_mm512_permutexvar_epi64(order, load_bytes(codes + i, k - i)), &first, &second);
    _mm512_storeu_si512(out, first);
    _mm512_storeu_si512(out + 64, second);
  }
  return 0;
}

void avx512_dequantise(quant::Format format, const std::byte* codes, const float* scales, int64_t k,
                       float* out) {
  const auto mask = [k](int64_t i) {
    const int64_t left = k - i;
    return static_cast<__mmask16>(left >= 16 ? 0xffffU : left <= 0 ? 0U : (1U << left) - 1U);
  };
  if (format == quant::Format::kW8A8Int8) {
    const __m512 scale = _mm512_set1_ps(scales[0]);
    for (int64_t i = 0; i < k; i += 16) {
      const __m512i v = _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask(i), codes + i));
      _mm512_mask_storeu_ps(out + i, mask(i), _mm512_mul_ps(_mm512_cvtepi32_ps(v), scale));
    }
    return;
  }
  const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
  for (int64_t i = 0; i < k; i += 64) {
    const __m512 scale = _mm512_set1_ps(scales[i / kGroup]);
    __m512i halves[2];
    widen_e4m3(_mm512_permutexvar_epi64(order, load_bytes(codes + i, k - i)), &halves[0],
               &halves[1]);
    unroll<4>([&](auto j) SORTIE_INLINE {
      const __m256i bits = j.value % 2 == 0 ? _mm512_castsi512_si256(halves[j.value / 2])
                                            : _mm512_extracti64x4_epi64(halves[j.value / 2], 1);
      const __m512 v = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
      const int64_t at = i + 16 * j.value;
      _mm512_mask_storeu_ps(out + at, mask(at), _mm512_mul_ps(v, scale));
    });
  }
}

void avx512_gemm_tiles(const Panel& p) {
  switch (p.format) {
    case quant::Format::kFp8Block:
      return gemm_groups<Fp8Tile>(p);
    case quant::Format::kW4Afp8:
      return gemm_groups<Int4Tile>(p);
    default:
      return gemm_int8(p);
  }
}

}  // namespace sortie::cpu
