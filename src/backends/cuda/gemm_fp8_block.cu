// e4m3 weights in 128x128 blocks, e4m3 rows with a scale every 128: a chunk is a block's width.
#include "backends/cuda/gemm.cuh"

namespace sortie::cuda {

namespace {

struct Fp8Block {
  using Sum = float;
  static constexpr int kWBytes = 32;
  static constexpr int kXBytes = 32;
  static constexpr bool kChunkScaled = true;
  static __device__ void expand(const uint32_t (&codes)[8], uint32_t (&wide)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) wide[i] = codes[i];
  }
  static __device__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_e4m3(d, a, b0, b1);
  }
  static __device__ void fold(float (&acc)[4], const float (&part)[4], const GemmArgs& a,
                              const std::byte* w_scales, const int (&rows)[2], int chunk,
                              int chunks, const std::byte* x0, const std::byte* x1) {
    const auto* scales = reinterpret_cast<const float*>(w_scales);
    const float x[2] = {reinterpret_cast<const float*>(x0 + a.x_scale_offset)[chunk],
                        reinterpret_cast<const float*>(x1 + a.x_scale_offset)[chunk]};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float w = scales[rows[j / 2] / 128 * chunks + chunk];
      acc[j] = fmaf(part[j], x[j % 2] * w, acc[j]);
    }
  }
  static __device__ float finish(float total, float, const std::byte*, int) { return total; }
};

}  // namespace

void gemm_fp8_block(const GemmArgs& a, const Context& c) { launch_gemm<Fp8Block>(a, c); }

}  // namespace sortie::cuda
