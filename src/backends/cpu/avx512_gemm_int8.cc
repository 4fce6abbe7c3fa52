// w8a8_int8: exact int32 sums with vpdpbusd, which takes one side unsigned: weights get +128 (the
// sign bit flipped) and 128 * sum(x) is taken off at the end. k * 255 * 127 fits up to k = 66,000.
#include "backends/cpu/avx512_gemm.h"

namespace sortie::cpu {
namespace {

struct Int8Gemm {
  struct Acc {
    __m512i sum;
  };
  static constexpr bool kFromMemory = true;
  static constexpr int kRows = 6;
  static constexpr int kStreamed = 4;
  static constexpr int64_t kBlock = 2048;

  static int64_t weight_bytes(int64_t k) { return k; }
  static __m512i flip(__m512i w) { return _mm512_xor_si512(w, _mm512_set1_epi8(-128)); }
  static __m512i load(const std::byte* p) { return _mm512_loadu_si512(p); }
  static __mmask64 first_bytes(int64_t n) { return n >= 64 ? ~0ULL : (1ULL << n) - 1U; }
  // Prepared rows are padded with zeros, so what stands past the end of a weight row only must not
  // be read.
  static __m512i load_weights(__mmask64 m, const std::byte* w) {
    return flip(_mm512_maskz_loadu_epi8(m, w));
  }

  template <int R>
  static void dot(const Panel& p, int64_t n, Acc (&acc)[R]) {
    const std::byte* w = p.w + n * p.w_stride;
    // Two chains a row; integer sums do not mind.
    __m512i first[R];
    __m512i second[R];
    unroll<R>([&](auto r) SORTIE_INLINE {
      first[r.value] = acc[r.value].sum;
      second[r.value] = _mm512_setzero_si512();
    });
    int64_t k = 0;
    for (; k + 128 <= p.k; k += 128) {
      prefetch_ahead(w + k);
      prefetch_ahead(w + k + 64);
      const __m512i w0 = flip(load(w + k));
      const __m512i w1 = flip(load(w + k + 64));
      unroll<R>([&](auto r) SORTIE_INLINE {
        const std::byte* x = p.rows[r.value].x + k;
        first[r.value] = dot_int8(first[r.value], w0, load(x));
        second[r.value] = dot_int8(second[r.value], w1, load(x + 64));
      });
    }
    for (; k < p.k; k += 64) {
      const __m512i v = load_weights(first_bytes(p.k - k), w + k);
      unroll<R>([&](auto r) SORTIE_INLINE {
        first[r.value] = dot_int8(first[r.value], v, load(p.rows[r.value].x + k));
      });
    }
    unroll<R>([&](auto r) SORTIE_INLINE {
      acc[r.value].sum = _mm512_add_epi32(first[r.value], second[r.value]);
    });
  }

  struct Block {
    const std::byte* w[kPanelColumns];
    int64_t k;
    int64_t size;
    void load(const Panel& p, int64_t n, int64_t columns, int64_t begin, int64_t count) {
      k = begin;
      size = count;
      for (int64_t j = 0; j < kPanelColumns; ++j)
        w[j] = p.w + (n + (j < columns ? j : columns - 1)) * p.w_stride + begin;
    }
  };

  template <int R>
  static void tile(const Panel& /*panel*/, const Block& b, const GemmRow* rows,
                   Acc (*acc)[kPanelColumns]) {
    __m512i a[R][kPanelColumns];
    unroll<R>([&](auto r) SORTIE_INLINE {
      unroll<kPanelColumns>([&](auto j) SORTIE_INLINE {
        a[r.value][j.value] = b.k == 0 ? _mm512_setzero_si512() : acc[r.value][j.value].sum;
      });
    });
    const auto step = [&](int64_t k, auto load_w) SORTIE_INLINE {
      __m512i w[kPanelColumns];
      unroll<kPanelColumns>([&](auto j)
                                SORTIE_INLINE { w[j.value] = held(load_w(b.w[j.value] + k)); });
      unroll<R>([&](auto r) SORTIE_INLINE {
        const __m512i x = held(load(rows[r.value].x + b.k + k));
        unroll<kPanelColumns>([&](auto j) SORTIE_INLINE {
          a[r.value][j.value] = dot_int8(a[r.value][j.value], w[j.value], x);
        });
      });
    };
    int64_t k = 0;
    for (; k + 64 <= b.size; k += 64) {
      step(k, [](const std::byte* w) SORTIE_INLINE { return flip(load(w)); });
    }
    if (k < b.size) {
      const __mmask64 m = first_bytes(b.size - k);
      step(k, [m](const std::byte* w) SORTIE_INLINE { return load_weights(m, w); });
    }
    unroll<R>([&](auto r) SORTIE_INLINE {
      unroll<kPanelColumns>([&](auto j)
                                SORTIE_INLINE { acc[r.value][j.value].sum = a[r.value][j.value]; });
    });
  }

  // As lane_sums, in integers.
  static __m128i int_lane_sums(const Acc (&a)[kPanelColumns]) {
    const auto fold = [](__m512i u, __m512i v) {
      return _mm512_add_epi32(_mm512_unpacklo_epi32(u, v), _mm512_unpackhi_epi32(u, v));
    };
    const __m512i ab = fold(a[0].sum, a[1].sum);
    const __m512i cd = fold(a[2].sum, a[3].sum);
    const __m512i lanes =
        _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    const __m256i half =
        _mm256_add_epi32(_mm512_castsi512_si256(lanes), _mm512_extracti64x4_epi64(lanes, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  }

  static void store(const Panel& p, const GemmRow& row, int64_t n, int64_t columns,
                    const Acc (&a)[kPanelColumns]) {
    const __m128i sum = _mm_sub_epi32(int_lane_sums(a), _mm_set1_epi32(128 * row.sum));
    const auto mask = static_cast<__mmask8>((1U << columns) - 1U);
    const __m128 w_scale = _mm_maskz_loadu_ps(mask, static_cast<const float*>(p.w_scales) + n);
    const __m128 y = _mm_mul_ps(_mm_cvtepi32_ps(sum), _mm_set1_ps(row.scale));
    store_columns(row.out + n, _mm_mul_ps(y, w_scale), columns);
  }
};

}  // namespace

void avx512_gemm_w8a8(const Panel& p) { run_panel<Int8Gemm>(p); }

}  // namespace sortie::cpu
