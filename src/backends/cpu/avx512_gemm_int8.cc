// w8a8_int8: exact int32 sums with vpdpbusd, which takes one side unsigned: weights get +128 (the
// sign bit flipped) and 128 * sum(x) is taken off at the end. k * 255 * 127 fits up to k = 66,000.
#include "backends/cpu/avx512_gemm.h"

namespace sortie::cpu {
namespace {

struct Int8Gemm {
  struct Acc {
    __m512i sum;
  };
  static constexpr int kRows = 6;
  static constexpr int64_t kBlock = 2048;

  static __m512i flip(__m512i w) { return _mm512_xor_si512(w, _mm512_set1_epi8(-128)); }
  static __m512i load(const std::byte* p) { return _mm512_loadu_si512(p); }
  // Prepared rows are padded with zeros, so what stands past the end of a weight row only must not
  // be read.
  static __m512i load_weights(const std::byte* w, int64_t left) {
    if (left >= 64) return flip(load(w));
    return flip(_mm512_maskz_loadu_epi8((1ULL << left) - 1U, w));
  }

  template <int R>
  static void dot(const Panel& p, int64_t n, Acc (&acc)[R]) {
    const std::byte* w = p.w + n * p.w_stride;
    // Two chains a row; integer sums do not mind.
    Acc second[R] = {};
    int64_t k = 0;
    for (; k + 128 <= p.k; k += 128) {
      const __m512i w0 = flip(load(w + k));
      const __m512i w1 = flip(load(w + k + 64));
      for (int r = 0; r < R; ++r) {
        acc[r].sum = _mm512_dpbusd_epi32(acc[r].sum, w0, load(p.rows[r].x + k));
        second[r].sum = _mm512_dpbusd_epi32(second[r].sum, w1, load(p.rows[r].x + k + 64));
      }
    }
    for (; k < p.k; k += 64) {
      const __m512i v = load_weights(w + k, p.k - k);
      for (int r = 0; r < R; ++r)
        acc[r].sum = _mm512_dpbusd_epi32(acc[r].sum, v, load(p.rows[r].x + k));
    }
    for (int r = 0; r < R; ++r) acc[r].sum = _mm512_add_epi32(acc[r].sum, second[r].sum);
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
    const std::byte* in[R];
    for (int r = 0; r < R; ++r) {
      in[r] = rows[r].x + b.k;
      for (int j = 0; j < kPanelColumns; ++j) a[r][j] = acc[r][j].sum;
    }
    const auto step = [&](const __m512i(&w)[kPanelColumns], int64_t k) {
      for (int r = 0; r < R; ++r) {
        const __m512i v = load(in[r] + k);
        for (int j = 0; j < kPanelColumns; ++j) a[r][j] = _mm512_dpbusd_epi32(a[r][j], w[j], v);
      }
    };
    int64_t k = 0;
    for (; k + 64 <= b.size; k += 64) {
      __m512i w[kPanelColumns];
      for (int j = 0; j < kPanelColumns; ++j) w[j] = flip(load(b.w[j] + k));
      step(w, k);
    }
    if (k < b.size) {
      __m512i w[kPanelColumns];
      for (int j = 0; j < kPanelColumns; ++j) w[j] = load_weights(b.w[j] + k, b.size - k);
      step(w, k);
    }
    for (int r = 0; r < R; ++r) {
      for (int j = 0; j < kPanelColumns; ++j) acc[r][j].sum = a[r][j];
    }
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
