// fp32 activations on bf16 or fp32 weights. Channels go in steps of 32; each output has two sums of
// 16 lanes, by fma, which are added at the end, then the lanes. Two chains an output, since one
// alone would hold a single row to 8 bytes of bf16 weights a cycle.
//
// With fp32 weights the sums take the halves of a step. With bf16 they take its even and its odd
// channels: the odd ones are a mask away from fp32, the even ones a shift, where widening each half
// takes two operations and the busier ports. `prepare` sorts activations the same way.
#include "backends/cpu/avx512_gemm.h"

namespace sortie::cpu {
namespace {

constexpr int64_t kStep = 32;

inline __mmask16 first_lanes(int64_t n) {
  if (n <= 0) return 0;
  return n >= 16 ? static_cast<__mmask16>(0xffff) : static_cast<__mmask16>((1U << n) - 1U);
}

inline __mmask32 first_half_words(int64_t n) {
  return n >= 32 ? ~0U : static_cast<__mmask32>((1U << n) - 1U);
}

struct Pair {
  __m512 first;
  __m512 second;
};

struct F32Weights {
  using Scalar = float;
  static Pair load(const float* w) { return {_mm512_loadu_ps(w), _mm512_loadu_ps(w + 16)}; }
  static Pair load(const float* w, int64_t left) {
    return {_mm512_maskz_loadu_ps(first_lanes(left), w),
            _mm512_maskz_loadu_ps(first_lanes(left - 16), w + 16)};
  }
  // Activations lie as they came, so what is past their end is not read either.
  static Pair activations(const float* x, int64_t left) { return load(x, left); }
};

struct Bf16Weights {
  using Scalar = uint16_t;
  static Pair widen(__m512i v) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(v, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(-65536)))};
  }
  static Pair load(const uint16_t* w) { return widen(_mm512_loadu_si512(w)); }
  static Pair load(const uint16_t* w, int64_t left) {
    return widen(_mm512_maskz_loadu_epi16(first_half_words(left), w));
  }
  // Prepared activations are padded with zeros.
  static Pair activations(const float* x, int64_t /*left*/) { return F32Weights::load(x); }
};

template <typename W>
struct F32Gemm {
  using Acc = Pair;
  static constexpr int kRows = 3;
  static constexpr int kStreamed = 2;
  static constexpr int64_t kBlock = 1024;
  using Scalar = typename W::Scalar;

  static int64_t weight_bytes(int64_t k) { return k * static_cast<int64_t>(sizeof(Scalar)); }
  static const float* x(const GemmRow& row) { return reinterpret_cast<const float*>(row.x); }
  SORTIE_INLINE static void add(Pair* acc, const Pair& x, const Pair& w) {
    acc->first = _mm512_fmadd_ps(x.first, w.first, acc->first);
    acc->second = _mm512_fmadd_ps(x.second, w.second, acc->second);
  }

  template <int R>
  static void dot(const Panel& p, int64_t n, Acc (&acc)[R]) {
    const auto* w = reinterpret_cast<const Scalar*>(p.w + n * p.w_stride);
    Acc a[R];
    unroll<R>([&](auto r) SORTIE_INLINE { a[r.value] = acc[r.value]; });
    int64_t k = 0;
    for (; k + kStep <= p.k; k += kStep) {
      prefetch_ahead(w + k);
      if (sizeof(Scalar) == 4) prefetch_ahead(w + k + 16);
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
    const Scalar* w[kPanelColumns];
    int64_t k;
    int64_t size;
    void load(const Panel& p, int64_t n, int64_t columns, int64_t begin, int64_t count) {
      k = begin;
      size = count;
      // Columns past the end repeat the last one and are not stored.
      for (int64_t j = 0; j < kPanelColumns; ++j) {
        const std::byte* row = p.w + (n + (j < columns ? j : columns - 1)) * p.w_stride;
        w[j] = reinterpret_cast<const Scalar*>(row) + begin;
      }
    }
  };

  template <int R>
  static void tile(const Panel& /*panel*/, const Block& b, const GemmRow* rows,
                   Acc (*acc)[kPanelColumns]) {
    Acc a[R][kPanelColumns];
    unroll<R>([&](auto r) SORTIE_INLINE {
      unroll<kPanelColumns>([&](auto j) SORTIE_INLINE {
        a[r.value][j.value] = b.k == 0 ? Acc{} : acc[r.value][j.value];
      });
    });
    const auto step = [&](int64_t k, auto load_x, auto load_w) SORTIE_INLINE {
      Pair row[R];
      unroll<R>([&](auto r) SORTIE_INLINE {
        row[r.value] = load_x(x(rows[r.value]) + b.k + k);
        row[r.value] = {held(row[r.value].first), held(row[r.value].second)};
      });
      unroll<kPanelColumns>([&](auto j) SORTIE_INLINE {
        Pair w = load_w(b.w[j.value] + k);
        w = {held(w.first), held(w.second)};
        unroll<R>([&](auto r) SORTIE_INLINE { add(&a[r.value][j.value], row[r.value], w); });
      });
    };
    int64_t k = 0;
    for (; k + kStep <= b.size; k += kStep) {
      step(
          k, [](const float* p) SORTIE_INLINE { return F32Weights::load(p); },
          [](const Scalar* p) SORTIE_INLINE { return W::load(p); });
    }
    if (k < b.size) {
      const int64_t left = b.size - k;
      step(
          k, [left](const float* p) SORTIE_INLINE { return W::activations(p, left); },
          [left](const Scalar* p) SORTIE_INLINE { return W::load(p, left); });
    }
    unroll<R>([&](auto r) SORTIE_INLINE {
      unroll<kPanelColumns>([&](auto j)
                                SORTIE_INLINE { acc[r.value][j.value] = a[r.value][j.value]; });
    });
  }

  static void store(const Panel& /*panel*/, const GemmRow& row, int64_t n, int64_t columns,
                    const Acc (&a)[kPanelColumns]) {
    store_columns(
        row.out + n,
        lane_sums(_mm512_add_ps(a[0].first, a[0].second), _mm512_add_ps(a[1].first, a[1].second),
                  _mm512_add_ps(a[2].first, a[2].second), _mm512_add_ps(a[3].first, a[3].second)),
        columns);
  }
};

}  // namespace

// Each step of 32 channels: the even ones, then the odd ones.
void avx512_prepare_f32(const float* x, int64_t k, float* out) {
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  for (int64_t i = 0; i < k; i += kStep) {
    const Pair p = F32Weights::load(x + i, k - i);
    _mm512_storeu_ps(out + i, _mm512_permutex2var_ps(p.first, even, p.second));
    _mm512_storeu_ps(out + i + 16, _mm512_permutex2var_ps(p.first, odd, p.second));
  }
}

void avx512_gemm_f32(const Panel& p) { run_panel<F32Gemm<F32Weights>>(p); }
void avx512_gemm_bf16(const Panel& p) { run_panel<F32Gemm<Bf16Weights>>(p); }

}  // namespace sortie::cpu
