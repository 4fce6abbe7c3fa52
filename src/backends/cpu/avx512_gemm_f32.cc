// fp32 activations on bf16 or fp32 weights. Chunk c of 16 channels goes to accumulator c % 2 of its
// output by fma; the two are added, then the lanes. Two chains an output, since one alone would
// hold a single row to 8 bytes of bf16 weights a cycle.
#include "backends/cpu/avx512_gemm.h"

namespace sortie::cpu {
namespace {

using quant::Format;

inline __mmask16 first_lanes(int64_t n) {
  return n >= 16 ? static_cast<__mmask16>(0xffff) : static_cast<__mmask16>((1U << n) - 1U);
}

inline __m512 widen(__m256i v) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}

struct F32Weights {
  using Scalar = float;
  static __m512 load(const float* w) { return _mm512_loadu_ps(w); }
  static __m512 load(__mmask16 m, const float* w) { return _mm512_maskz_loadu_ps(m, w); }
};
struct Bf16Weights {
  using Scalar = uint16_t;
  static __m512 load(const uint16_t* w) {
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w)));
  }
  static __m512 load(__mmask16 m, const uint16_t* w) {
    return widen(_mm256_maskz_loadu_epi16(m, w));
  }
};

template <typename W>
struct F32Gemm {
  struct Acc {
    __m512 even;
    __m512 odd;
  };
  static constexpr int kRows = 3;
  static constexpr int64_t kBlock = 1024;
  using Scalar = typename W::Scalar;

  static const float* x(const GemmRow& row) { return reinterpret_cast<const float*>(row.x); }

  // At most 31 channels are left: an even chunk, and an odd one if more than 16.
  template <typename V>
  static void tail(const float* x, const typename V::Scalar* w, int64_t left, Acc* acc) {
    const __mmask16 m = first_lanes(left);
    acc->even = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(m, x), V::load(m, w), acc->even);
    if (left <= 16) return;
    const __mmask16 m2 = first_lanes(left - 16);
    acc->odd = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(m2, x + 16), V::load(m2, w + 16), acc->odd);
  }

  template <int R>
  static void dot(const Panel& p, int64_t n, Acc (&acc)[R]) {
    const auto* w = reinterpret_cast<const Scalar*>(p.w + n * p.w_stride);
    int64_t k = 0;
    for (; k + 32 <= p.k; k += 32) {
      const __m512 even = W::load(w + k);
      const __m512 odd = W::load(w + k + 16);
      for (int r = 0; r < R; ++r) {
        const float* row = x(p.rows[r]) + k;
        acc[r].even = _mm512_fmadd_ps(_mm512_loadu_ps(row), even, acc[r].even);
        acc[r].odd = _mm512_fmadd_ps(_mm512_loadu_ps(row + 16), odd, acc[r].odd);
      }
    }
    if (k == p.k) return;
    for (int r = 0; r < R; ++r) tail<W>(x(p.rows[r]) + k, w + k, p.k - k, &acc[r]);
  }

  // fp32 weights are used where they lie, bf16 widened once for all rows.
  struct Block {
    const float* w[kPanelColumns];
    int64_t k;
    int64_t size;
    alignas(64) float widened[kPanelColumns][kBlock];

    void load(const Panel& p, int64_t n, int64_t columns, int64_t begin, int64_t count) {
      k = begin;
      size = count;
      for (int64_t j = 0; j < kPanelColumns; ++j) {
        // Columns past the end repeat the last one and are not stored.
        const std::byte* row = p.w + (n + (j < columns ? j : columns - 1)) * p.w_stride;
        const auto* from = reinterpret_cast<const Scalar*>(row) + begin;
        if constexpr (sizeof(Scalar) == sizeof(float)) {
          w[j] = from;
        } else {
          int64_t i = 0;
          for (; i + 16 <= count; i += 16) _mm512_store_ps(widened[j] + i, W::load(from + i));
          if (i < count) _mm512_store_ps(widened[j] + i, W::load(first_lanes(count - i), from + i));
          w[j] = widened[j];
        }
      }
    }
  };

  template <int R>
  static void tile(const Panel& /*panel*/, const Block& b, const GemmRow* rows,
                   Acc (*acc)[kPanelColumns]) {
    Acc a[R][kPanelColumns];
    const float* in[R];
    for (int r = 0; r < R; ++r) {
      in[r] = x(rows[r]) + b.k;
      for (int j = 0; j < kPanelColumns; ++j) a[r][j] = acc[r][j];
    }
    int64_t k = 0;
    for (; k + 32 <= b.size; k += 32) {
      __m512 even[kPanelColumns];
      __m512 odd[kPanelColumns];
      for (int j = 0; j < kPanelColumns; ++j) even[j] = _mm512_loadu_ps(b.w[j] + k);
      for (int r = 0; r < R; ++r) {
        const __m512 v = _mm512_loadu_ps(in[r] + k);
        for (int j = 0; j < kPanelColumns; ++j)
          a[r][j].even = _mm512_fmadd_ps(v, even[j], a[r][j].even);
      }
      for (int j = 0; j < kPanelColumns; ++j) odd[j] = _mm512_loadu_ps(b.w[j] + k + 16);
      for (int r = 0; r < R; ++r) {
        const __m512 v = _mm512_loadu_ps(in[r] + k + 16);
        for (int j = 0; j < kPanelColumns; ++j)
          a[r][j].odd = _mm512_fmadd_ps(v, odd[j], a[r][j].odd);
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int j = 0; j < kPanelColumns; ++j) {
        if (k < b.size) tail<F32Weights>(in[r] + k, b.w[j] + k, b.size - k, &a[r][j]);
        acc[r][j] = a[r][j];
      }
    }
  }

  static void store(const Panel& /*panel*/, const GemmRow& row, int64_t n, int64_t columns,
                    const Acc (&a)[kPanelColumns]) {
    store_columns(row.out + n,
                  lane_sums(_mm512_add_ps(a[0].even, a[0].odd), _mm512_add_ps(a[1].even, a[1].odd),
                            _mm512_add_ps(a[2].even, a[2].odd), _mm512_add_ps(a[3].even, a[3].odd)),
                  columns);
  }
};

}  // namespace

void avx512_gemm_f32(const Panel& p) { run_panel<F32Gemm<F32Weights>>(p); }
void avx512_gemm_bf16(const Panel& p) { run_panel<F32Gemm<Bf16Weights>>(p); }

}  // namespace sortie::cpu
