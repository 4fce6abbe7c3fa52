#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backends/cuda/device.h"
#include "ops/ops.h"

// What every kernel here uses: scalar conversions, block reductions, and launches whose errors are
// kept for the stream's finish.
namespace sortie::cuda {

using Context = ops::Context;

inline cudaStream_t stream_of(const Context& c) { return static_cast<cudaStream_t>(c.stream); }

#define SORTIE_LAUNCH(kernel, grid, block, shared_bytes, context, ...)                            \
  do {                                                                                            \
    kernel<<<(grid), (block), (shared_bytes), ::sortie::cuda::stream_of(context)>>>(__VA_ARGS__); \
    ::sortie::cuda::note_launch(#kernel);                                                         \
  } while (0)

// Lets a kernel use more than 48 KB of dynamic shared memory.
template <typename Kernel>
void allow_shared(Kernel* kernel, size_t bytes) {
  if (bytes > (size_t{48} << 10)) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         static_cast<int>(bytes));
  }
}

constexpr int kWarp = 32;
constexpr unsigned kAll = 0xffffffffu;

__device__ inline float f32(bf16 v) { return __uint_as_float(static_cast<uint32_t>(v.bits) << 16); }
__device__ inline float f32(float v) { return v; }
__device__ inline bf16 round_bf16(float v) {
  bf16 r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.bits) : "f"(v));
  return r;
}

// e4m3 code of v, rounded half to even, saturating; NaN keeps its sign (base/scalar.h).
__device__ inline uint8_t e4m3_code(float v) {
  if (v != v) return static_cast<uint8_t>(0x7fu | (__float_as_uint(v) >> 24 & 0x80u));
  uint16_t two;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(0.0f), "f"(v));
  return static_cast<uint8_t>(two);
}

__device__ inline float warp_sum(float v) {
  for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(kAll, v, d);
  return v;
}
__device__ inline uint32_t warp_max(uint32_t v) { return __reduce_max_sync(kAll, v); }

// The block's sum or maximum on every thread, by one fixed tree. `space` holds 32 words and may be
// used again at once.
__device__ inline float block_sum(float v, float* space) {
  v = warp_sum(v);
  if (threadIdx.x % kWarp == 0) space[threadIdx.x / kWarp] = v;
  __syncthreads();
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  v = warp_sum(threadIdx.x % kWarp < warps ? space[threadIdx.x % kWarp] : 0.0f);
  __syncthreads();
  return v;
}
__device__ inline uint32_t block_max(uint32_t v, float* space) {
  auto* words = reinterpret_cast<uint32_t*>(space);
  v = warp_max(v);
  if (threadIdx.x % kWarp == 0) words[threadIdx.x / kWarp] = v;
  __syncthreads();
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  v = warp_max(threadIdx.x % kWarp < warps ? words[threadIdx.x % kWarp] : 0u);
  __syncthreads();
  return v;
}

}  // namespace sortie::cuda
