#pragma once

#include <immintrin.h>

#include "backends/cpu/kernels.h"

// The walk over a panel that all formats share. A format F supplies
//
//   Acc          the state of one output (row, n) between blocks of k
//   kRows        rows of the register tile
//   kBlock       k a block: a multiple of what one step of the tile takes
//   dot<R>       one weight row, unpacked on the fly, against R rows over all of k
//   Block        4 weight rows of one block, unpacked or pointed at
//   tile<R>      Block against R rows
//   store        4 neighbouring outputs of a row
//
// With at most kRows rows weights are the traffic: each thread reads them as one stream, a weight
// row at a time (several streams a thread measured 1.5 to 2 times slower). With more rows each
// weight is unpacked once for all of them. Both forms do the same sums in the same order.
namespace sortie::cpu {
namespace {

// Sums of the 16 lanes of each of a, b, c, d, by the same tree for each.
[[maybe_unused]] inline __m128 lane_sums(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512 low = _mm512_shuffle_ps(ab, cd, _MM_SHUFFLE(1, 0, 1, 0));
  const __m512 high = _mm512_shuffle_ps(ab, cd, _MM_SHUFFLE(3, 2, 3, 2));
  const __m512 lanes = _mm512_add_ps(low, high);
  const __m256 half =
      _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

[[maybe_unused]] inline void store_columns(float* out, __m128 y, int64_t columns) {
  if (columns >= kPanelColumns) {
    _mm_storeu_ps(out, y);
  } else {
    _mm_mask_storeu_ps(out, static_cast<__mmask8>((1U << columns) - 1U), y);
  }
}

template <typename F, int kRows>
void stream_rows(const Panel& p) {
  using Acc = typename F::Acc;
  for (int64_t n = p.n_begin; n < p.n_end; n += kPanelColumns) {
    const int64_t columns = p.n_end - n < kPanelColumns ? p.n_end - n : kPanelColumns;
    Acc done[kRows][kPanelColumns] = {};
    for (int64_t j = 0; j < columns; ++j) {
      Acc acc[kRows] = {};
      F::template dot<kRows>(p, n + j, acc);
      for (int r = 0; r < kRows; ++r) done[r][j] = acc[r];
    }
    for (int r = 0; r < kRows; ++r) F::store(p, p.rows[r], n, columns, done[r]);
  }
}

template <typename F, int kRows>
void tile_of(const Panel& p, const typename F::Block& block, const GemmRow* rows, int64_t left,
             typename F::Acc (*acc)[kPanelColumns]) {
  if (left >= kRows) {
    F::template tile<kRows>(p, block, rows, acc);
  } else if constexpr (kRows > 1) {
    tile_of<F, kRows - 1>(p, block, rows, left, acc);
  }
}

template <typename F>
void blocked_rows(const Panel& p) {
  using Acc = typename F::Acc;
  typename F::Block block;
  Acc acc[kPanelRows][kPanelColumns];
  for (int64_t n = p.n_begin; n < p.n_end; n += kPanelColumns) {
    const int64_t columns = p.n_end - n < kPanelColumns ? p.n_end - n : kPanelColumns;
    for (int64_t r = 0; r < p.count; ++r) {
      for (Acc& a : acc[r]) a = Acc{};
    }
    for (int64_t k = 0; k < p.k; k += F::kBlock) {
      block.load(p, n, columns, k, p.k - k < F::kBlock ? p.k - k : F::kBlock);
      for (int64_t r = 0; r < p.count; r += F::kRows) {
        tile_of<F, F::kRows>(p, block, p.rows + r, p.count - r, acc + r);
      }
    }
    for (int64_t r = 0; r < p.count; ++r) F::store(p, p.rows[r], n, columns, acc[r]);
  }
}

template <typename F, int kRows>
void stream_of(const Panel& p) {
  if (p.count == kRows) {
    stream_rows<F, kRows>(p);
  } else if constexpr (kRows > 1) {
    stream_of<F, kRows - 1>(p);
  }
}

template <typename F>
void run_panel(const Panel& p) {
  if (p.count <= F::kRows) {
    stream_of<F, F::kRows>(p);
  } else {
    blocked_rows<F>(p);
  }
}

}  // namespace

// One a format, each in its own file.
void avx512_gemm_f32(const Panel& p);
void avx512_gemm_bf16(const Panel& p);
void avx512_gemm_fp8_block(const Panel& p);
void avx512_gemm_w4afp8(const Panel& p);
void avx512_gemm_w8a8(const Panel& p);

int32_t avx512_prepare(quant::Format format, const std::byte* codes, int64_t k, std::byte* out);

}  // namespace sortie::cpu
