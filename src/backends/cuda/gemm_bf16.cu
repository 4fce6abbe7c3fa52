// bf16 weights, bf16 rows, fp32 sums.
#include "backends/cuda/gemm.cuh"

namespace sortie::cuda {

namespace {

struct Bf16 {
  using Sum = float;
  static constexpr int kWBytes = 64;
  static constexpr int kXBytes = 64;
  static constexpr bool kChunkScaled = false;
  static __device__ void expand(const uint32_t (&codes)[16], uint32_t (&wide)[16]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) wide[i] = codes[i];
  }
  static __device__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_bf16(d, a, b0, b1);
  }
  static __device__ float finish(float total, float, const std::byte*, int) { return total; }
};

}  // namespace

void gemm_bf16(const GemmArgs& a, const Context& c) { launch_gemm<Bf16>(a, c); }

}  // namespace sortie::cuda
