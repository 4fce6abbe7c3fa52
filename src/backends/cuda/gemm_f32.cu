// fp32 weights (routers of some checkpoints), bf16 rows: too few to want more than a warp a result.
// Each lane sums every 32nd product in ascending K, the lanes are added by one fixed tree.
#include "backends/cuda/gemm.h"
#include "backends/cuda/kernel.cuh"

namespace sortie::cuda {

namespace {

constexpr int kWarps = 8;

__global__ void gemm_f32_kernel(const __grid_constant__ GemmArgs a) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int n = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / kWarp;
  const int matrix = static_cast<int>(blockIdx.y);
  const int group = matrix / a.parts;
  if (n >= a.n) return;
  const int begin = a.offsets == nullptr ? 0 : a.offsets[group];
  const int count = a.offsets == nullptr ? a.rows : a.offsets[group + 1] - begin;
  const auto* w = reinterpret_cast<const float*>(a.w + matrix * a.w_bytes + n * a.w_row_bytes);
  for (int entry = static_cast<int>(blockIdx.z); entry < count;
       entry += static_cast<int>(gridDim.z)) {
    const int64_t row = a.row_index == nullptr ? begin + entry : a.row_index[begin + entry];
    const auto* x =
        reinterpret_cast<const bf16*>(a.x + group * a.x_group_bytes + row * a.x_row_bytes);
    float sum = 0;
    for (int k = lane; k < a.k; k += kWarp) sum = fmaf(f32(x[k]), w[k], sum);
    sum = warp_sum(sum);
    if (a.bias != nullptr) sum += a.bias[n];
    const int64_t to = group * a.y_group_stride + (begin + entry) * a.y_stride +
                       (matrix % a.parts) * int64_t{a.n} + n;
    if (lane != 0) continue;
    if (a.y32 != nullptr) {
      a.y32[to] = sum;
    } else {
      a.y16[to] = round_bf16(sum);
    }
  }
}

}  // namespace

void gemm_f32(const GemmArgs& a, const Context& c) {
  if (a.rows == 0 || a.n == 0) return;
  const dim3 grid(static_cast<unsigned>((a.n + kWarps - 1) / kWarps),
                  static_cast<unsigned>(a.groups * a.parts),
                  static_cast<unsigned>(min(a.rows, 256)));
  SORTIE_LAUNCH(gemm_f32_kernel, grid, kWarps * kWarp, 0, c, a);
}

}  // namespace sortie::cuda
