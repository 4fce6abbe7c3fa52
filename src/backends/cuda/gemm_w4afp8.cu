// int4 weights with a bf16 scale every 128, e4m3 rows with one scale: a chunk is a group.
#include "backends/cuda/gemm.cuh"
#include "backends/cuda/int4.cuh"

namespace sortie::cuda {

namespace {

struct W4Afp8 {
  using Sum = float;
  static constexpr int kWBytes = 16;
  static constexpr int kXBytes = 32;
  static constexpr bool kChunkScaled = true;
  static __device__ void expand(const uint32_t (&codes)[4], uint32_t (&wide)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      wide[2 * i] = e4m3_of_int4(codes[i]);
      wide[2 * i + 1] = e4m3_of_int4(codes[i] >> 16);
    }
  }
  static __device__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_e4m3(d, a, b0, b1);
  }
  static __device__ void fold(float (&acc)[4], const float (&part)[4], const GemmArgs&,
                              const std::byte* w_scales, const int (&rows)[2], int chunk,
                              int chunks, const std::byte*, const std::byte*) {
    const auto* scales = reinterpret_cast<const bf16*>(w_scales);
    const float w[2] = {f32(scales[int64_t{rows[0]} * chunks + chunk]),
                        f32(scales[int64_t{rows[1]} * chunks + chunk])};
#pragma unroll
    for (int j = 0; j < 4; ++j) acc[j] = fmaf(part[j], w[j / 2], acc[j]);
  }
  static __device__ float finish(float total, float row_scale, const std::byte*, int) {
    return total * row_scale;
  }
};

}  // namespace

void gemm_w4afp8(const GemmArgs& a, const Context& c) { launch_gemm<W4Afp8>(a, c); }

}  // namespace sortie::cuda
