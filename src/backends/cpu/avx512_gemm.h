#pragma once

#include <immintrin.h>

#include "backends/cpu/kernels.h"

// The walk over a panel that all formats share. A format F supplies
//
//   Acc          the state of one output (row, n) between blocks of k
//   kRows        rows of the register tile
//   kStreamed    rows up to which weights are streamed, see below
//   kBlock       k a block: a multiple of what one step of the tile takes
//   weight_bytes bytes of so many channels
//   dot<R>       one weight row, unpacked on the fly, against R rows over all of k
//   Block        4 weight rows of one block, unpacked or pointed at
//   tile<R>      Block against R rows; the block at k = 0 starts the sums
//   store        4 neighbouring outputs of a row
//
// With at most kRows rows weights are the traffic: each thread reads them as one stream, a weight
// row at a time (several streams a thread measured 1.5 to 2 times slower). With more rows each
// weight is unpacked once for all of them. Both forms do the same sums in the same order.
namespace sortie::cpu {
namespace {

// Keeps a value that several instructions use in its register. GCC otherwise loads it again as each
// one's memory operand, and loads, of which there is one a cycle, become the bound.
template <typename V>
[[maybe_unused]] inline V held(V v) {
  asm("" : "+v"(v));
  return v;
}

// f(Index<0>), f(Index<1>) ... f(Index<n-1>), all inlined at once: then every index into an array
// of sums is a constant before GCC decides what lives in registers. With plain loops it keeps a
// copy of each sum on the stack up to date, at half the speed.
template <int kI>
struct Index {
  static constexpr int value = kI;
};
#define SORTIE_INLINE __attribute__((always_inline))
template <int kN, int kI = 0, typename F>
[[maybe_unused]] SORTIE_INLINE inline void unroll(const F& f) {
  if constexpr (kI < kN) {
    f(Index<kI>{});
    unroll<kN, kI + 1>(f);
  }
}

// Asks for what a stream of weight rows will need, far enough ahead for memory and into the second
// level, so that the activations keep the first. Measured at one row of k = 7168, bf16, of the read
// bandwidth: 56 % without, 65 % with 1 to 4 KB ahead into the first level, 74 % so. Packed tiles
// are one long stream that the processor finds by itself: there it cost a quarter
// (avx512_tiles.cc).
[[maybe_unused]] SORTIE_INLINE inline void prefetch_ahead(const void* w) {
  _mm_prefetch(static_cast<const char*>(w) + 8192, _MM_HINT_T1);
}

// vpdpbusd (unsigned w) and vdpbf16ps. As intrinsics GCC 12 copies each sum before and after, and
// spills some: a 6 x 4 tile then runs at half the speed.
[[maybe_unused]] SORTIE_INLINE inline __m512i dot_int8(__m512i sum, __m512i w, __m512i x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
  return sum;
}
[[maybe_unused]] SORTIE_INLINE inline __m512 dot_bf16(__m512 sum, __m512i w, __m512i x) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
  return sum;
}

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

// Four columns a turn, each by itself from end to end.
template <typename F, int kRows>
void stream_rows(const Panel& p) {
  using Acc = typename F::Acc;
  for (int64_t n = p.n_begin; n < p.n_end; n += kPanelColumns) {
    const int64_t columns = p.n_end - n < kPanelColumns ? p.n_end - n : kPanelColumns;
    Acc done[kPanelColumns][kRows] = {};
    for (int64_t j = 0; j < columns; ++j) F::template dot<kRows>(p, n + j, done[j]);
    for (int r = 0; r < kRows; ++r) {
      const Acc row[kPanelColumns] = {done[0][r], done[1][r], done[2][r], done[3][r]};
      F::store(p, p.rows[r], n, columns, row);
    }
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

// The block of weights that comes after the one at (n, k): the next columns', if there are any.
template <typename F>
void prefetch_block(const Panel& p, int64_t n, int64_t k, int64_t size) {
  for (int64_t j = n; j < n + kPanelColumns && j < p.n_end; ++j) {
    const std::byte* w = p.w + j * p.w_stride + F::weight_bytes(k);
    for (int64_t i = 0; i < F::weight_bytes(size); i += 64) _mm_prefetch(w + i, _MM_HINT_T1);
  }
}

template <typename F>
void blocked_rows(const Panel& p) {
  using Acc = typename F::Acc;
  typename F::Block block;
  Acc acc[kPanelRows][kPanelColumns];
  for (int64_t n = p.n_begin; n < p.n_end; n += kPanelColumns) {
    const int64_t columns = p.n_end - n < kPanelColumns ? p.n_end - n : kPanelColumns;
    for (int64_t k = 0; k < p.k; k += F::kBlock) {
      const int64_t size = p.k - k < F::kBlock ? p.k - k : F::kBlock;
      prefetch_block<F>(p, n + kPanelColumns, k, size);
      block.load(p, n, columns, k, size);
      for (int64_t r = 0; r < p.count;) {
        const int64_t left = p.count - r;
        // Not a last tile of a single row, whose few chains do not hide the latency.
        const int64_t rows = left == F::kRows + 1 ? (left + 1) / 2 : left;
        tile_of<F, F::kRows>(p, block, p.rows + r, rows, acc + r);
        r += rows < F::kRows ? rows : F::kRows;
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
  if (p.count <= F::kStreamed) {
    stream_of<F, F::kStreamed>(p);
  } else {
    blocked_rows<F>(p);
  }
}

}  // namespace

void avx512_gemm_f32(const Panel& p);
void avx512_gemm_bf16(const Panel& p);
void avx512_gemm_tiles(const Panel& p);  // the quantised formats, packed

void avx512_attend_prepare(const float* q, int64_t heads, int64_t width, std::byte* out);
void avx512_attend(const AttendBlock& block);
void avx512_prepare_f32(const float* x, int64_t k, float* out);  // for bf16 weights
void avx512_dequantise(quant::Format format, const std::byte* codes, const float* scales, int64_t k,
                       float* out);
int32_t avx512_prepare(quant::Format format, const std::byte* codes, int64_t k, std::byte* out);

}  // namespace sortie::cpu
