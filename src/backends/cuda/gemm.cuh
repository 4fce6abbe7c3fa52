#pragma once

#include "backends/cuda/gemm.h"
#include "backends/cuda/kernel.cuh"
#include "backends/cuda/ptx.cuh"

// The plain GEMM for every format and shape, on mma.sync.
//
//   block   8 warps: k_segments(K) of them share 16 rows of W, each with its segment of K
//   warp    16 rows of W (the M side) x 8*TILES rows of x (the N side), straight from memory: no
//           shared-memory staging, the next chunk of W is asked for while one is multiplied
//   lane l  of each chunk of 128 it holds k in [32*(l%4), +32) of W's rows l/4 and l/4 + 8 and of
//           x's row l/4. An mma adds products in any assignment of k to its slots as long as W and
//           x agree, so both use the order in memory and load 16 bytes at a time.
//
// Bound: W's bytes in decode (each is read once per 8*TILES rows); it is far from the tensor cores'
// rate in prefill, where every block reads x again.
namespace sortie::cuda {

// A format says how 32 consecutive k of a row become the registers of an mma, and what happens at a
// chunk's end:
//   kWBytes, kXBytes   bytes of 32 codes of W and x;  Sum: float or int
//   static void expand(const uint32_t (&codes)[kWBytes / 4], uint32_t (&a)[kXBytes / 4])
//   static void mma(Sum (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
//   kChunkScaled       sums of a chunk start from zero and are folded with scales
template <typename F>
struct GemmKernel {
  static constexpr int kXRegs = F::kXBytes / 4;
  static constexpr int kWRegs = F::kWBytes / 4;
  using Sum = typename F::Sum;

  // `bytes` (a multiple of 4) from `at`, of which those past `end` are zero.
  template <int kRegs>
  static __device__ void load(uint32_t (&to)[kRegs], const std::byte* at, const std::byte* end,
                              bool aligned) {
    if (aligned && at + kRegs * 4 <= end) {
#pragma unroll
      for (int i = 0; i < kRegs / 4; ++i) {
        const uint4 v = __ldg(reinterpret_cast<const uint4*>(at) + i);
        to[4 * i] = v.x;
        to[4 * i + 1] = v.y;
        to[4 * i + 2] = v.z;
        to[4 * i + 3] = v.w;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kRegs; ++i) to[i] = 0;
    if (at >= end) return;
#pragma unroll
    for (int i = 0; i < kRegs; ++i) {
      uint32_t word = 0;
      for (int b = 0; b < 4; ++b) {
        const std::byte* p = at + 4 * i + b;
        if (p < end) word |= static_cast<uint32_t>(*p) << (8 * b);
      }
      to[i] = word;
    }
  }

  struct Weights {
    uint32_t codes[2][kWRegs];  // rows l/4 and l/4 + 8
  };
};

template <typename F, int TILES>
__global__ void __launch_bounds__(kWarpsOfBlock* kWarp)
    gemm_kernel(const __grid_constant__ GemmArgs a, int segments) {
  using Kernel = GemmKernel<F>;
  using Sum = typename F::Sum;
  constexpr int kColumns = 8 * TILES;
  __shared__ Sum sums[kWarpsOfBlock][16][kColumns];

  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int g = lane / 4;
  const int t = lane % 4;
  const int segment = warp % segments;
  const int row_tiles = kWarpsOfBlock / segments;  // a block's
  const int first_row = (static_cast<int>(blockIdx.x) * row_tiles + warp / segments) * 16;
  const int matrix = static_cast<int>(blockIdx.y);
  const int group = matrix / a.parts;
  const int begin = a.offsets == nullptr ? 0 : a.offsets[group];
  const int count = a.offsets == nullptr ? a.rows : a.offsets[group + 1] - begin;
  const std::byte* w = a.w + matrix * a.w_bytes;
  const std::byte* w_scales = a.w_scales + matrix * a.w_scale_bytes;

  const int chunks = (a.k + kChunk - 1) / kChunk;
  const int chunk_begin = chunks * segment / segments;
  const int chunk_end = chunks * (segment + 1) / segments;
  // Rows past n repeat the last one; their results are not stored.
  const int rows[2] = {min(first_row + g, a.n - 1), min(first_row + g + 8, a.n - 1)};
  const int x_bytes = a.k * F::kXBytes / 32;

  for (int tile = static_cast<int>(blockIdx.z); tile * kColumns < count;
       tile += static_cast<int>(gridDim.z)) {
    const std::byte* x[TILES];
    int columns[TILES];  // how far this lane's x row is a real one: 0 = not at all
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      const int entry = tile * kColumns + i * 8 + g;
      columns[i] = entry < count ? 1 : 0;
      const int from = min(entry, count - 1) + begin;
      const int64_t row = a.row_index == nullptr ? from : a.row_index[from];
      x[i] = a.x + group * a.x_group_bytes + row * a.x_row_bytes;
    }
    Sum acc[TILES][4] = {};

    const auto load_weights = [&](typename Kernel::Weights& to, int chunk) {
      const int at = (chunk * kChunk + t * 32) / 32 * F::kWBytes;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const std::byte* row = w + rows[r] * a.w_row_bytes;
        Kernel::load(to.codes[r], row + at, row + a.w_row_bytes, a.aligned);
      }
    };
    typename Kernel::Weights next;
    if (chunk_begin < chunk_end) load_weights(next, chunk_begin);
    for (int chunk = chunk_begin; chunk < chunk_end; ++chunk) {
      uint32_t wide[2][Kernel::kXRegs];
#pragma unroll
      for (int r = 0; r < 2; ++r) F::expand(next.codes[r], wide[r]);
      if (chunk + 1 < chunk_end) load_weights(next, chunk + 1);
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
        uint32_t b[Kernel::kXRegs];
        const int at = (chunk * kChunk + t * 32) * F::kXBytes / 32;
        Kernel::load(b, x[i] + at, x[i] + (columns[i] != 0 ? x_bytes : 0), a.aligned);
        Sum part[4] = {};
        Sum(&d)[4] = F::kChunkScaled ? part : acc[i];
#pragma unroll
        for (int m = 0; m < Kernel::kXRegs / 2; ++m) {
          F::mma(d, {wide[0][2 * m], wide[1][2 * m], wide[0][2 * m + 1], wide[1][2 * m + 1]},
                 b[2 * m], b[2 * m + 1]);
        }
        if constexpr (F::kChunkScaled) {
          F::fold(acc[i], part, a, w_scales, rows, chunk, chunks,
                  // the scales of columns 2t and 2t + 1 stand behind other lanes' rows
                  reinterpret_cast<const std::byte*>(
                      __shfl_sync(kAll, reinterpret_cast<uintptr_t>(x[i]), 8 * t)),
                  reinterpret_cast<const std::byte*>(
                      __shfl_sync(kAll, reinterpret_cast<uintptr_t>(x[i]), 8 * t + 4)));
        }
      }
    }

#pragma unroll
    for (int i = 0; i < TILES; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[warp][g + j / 2 * 8][i * 8 + 2 * t + j % 2] = acc[i][j];
    }
    __syncthreads();
    for (int at = static_cast<int>(threadIdx.x); at < row_tiles * 16 * kColumns;
         at += kWarpsOfBlock * kWarp) {
      const int row = at % 16;
      const int column = at / 16 % kColumns;
      const int row_tile = at / 16 / kColumns;
      const int n = (static_cast<int>(blockIdx.x) * row_tiles + row_tile) * 16 + row;
      const int entry = tile * kColumns + column;
      if (n >= a.n || entry >= count) continue;
      Sum total = sums[row_tile * segments][row][column];
      for (int s = 1; s < segments; ++s) total += sums[row_tile * segments + s][row][column];
      const int64_t x_row = a.row_index == nullptr ? begin + entry : a.row_index[begin + entry];
      const std::byte* x_row_at = a.x + group * a.x_group_bytes + x_row * a.x_row_bytes;
      const float row_scale = a.has_row_scale
                                  ? *reinterpret_cast<const float*>(x_row_at + a.x_scale_offset)
                                  : a.static_scale;
      float y = F::finish(total, row_scale, w_scales, n);
      if (a.bias != nullptr) y += a.bias[n];
      const int64_t to = group * a.y_group_stride + (begin + entry) * a.y_stride +
                         (matrix % a.parts) * int64_t{a.n} + n;
      if (a.y32 != nullptr) {
        a.y32[to] = y;
      } else {
        a.y16[to] = round_bf16(y);
      }
    }
    __syncthreads();
  }
}

template <typename F>
void launch_gemm(const GemmArgs& a, const Context& c) {
  if (a.rows == 0 || a.n == 0 || a.groups == 0) return;
  const int segments = k_segments(a.k);
  const int rows_of_block = 16 * kWarpsOfBlock / segments;
  const int tiles = token_tiles(a.rows);
  const auto blocks = [](int64_t n, int64_t of) {
    return static_cast<unsigned>((n + of - 1) / of);
  };
  // With lists few groups are full: blocks walk their tiles instead of being there for all.
  const unsigned columns = blocks(a.rows, 8 * tiles);
  const dim3 grid(blocks(a.n, rows_of_block), static_cast<unsigned>(a.groups * a.parts),
                  a.offsets == nullptr ? columns : min(columns, 4u));
  constexpr int kThreads = kWarpsOfBlock * kWarp;
  switch (tiles) {
    case 1:
      SORTIE_LAUNCH((gemm_kernel<F, 1>), grid, kThreads, 0, c, a, segments);
      return;
    case 2:
      SORTIE_LAUNCH((gemm_kernel<F, 2>), grid, kThreads, 0, c, a, segments);
      return;
    case 4:
      SORTIE_LAUNCH((gemm_kernel<F, 4>), grid, kThreads, 0, c, a, segments);
      return;
    default:
      SORTIE_LAUNCH((gemm_kernel<F, 8>), grid, kThreads, 0, c, a, segments);
      return;
  }
}

}  // namespace sortie::cuda
