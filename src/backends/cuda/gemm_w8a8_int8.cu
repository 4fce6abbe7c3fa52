// int8 weights with a scale a row, int8 rows with one scale: exact int32 sums.
#include "backends/cuda/gemm.cuh"

namespace sortie::cuda {

namespace {

struct W8A8Int8 {
  using Sum = int;
  static constexpr int kWBytes = 32;
  static constexpr int kXBytes = 32;
  static constexpr bool kChunkScaled = false;
  static __device__ void expand(const uint32_t (&codes)[8], uint32_t (&wide)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) wide[i] = codes[i];
  }
  static __device__ void mma(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_int8(d, a, b0, b1);
  }
  static __device__ float finish(int total, float row_scale, const std::byte* w_scales, int n) {
    return (static_cast<float>(total) * row_scale) * reinterpret_cast<const float*>(w_scales)[n];
  }
};

}  // namespace

void gemm_w8a8_int8(const GemmArgs& a, const Context& c) { launch_gemm<W8A8Int8>(a, c); }

}  // namespace sortie::cuda
