#include "backends/cuda/cuda.h"
#include "backends/cuda/device.h"
#include "backends/cuda/ops.h"

namespace sortie::cuda {

const ops::BackendOf<bf16>& backend() {
  static const ops::BackendOf<bf16> kBackend = {
      .name = "cuda-sm90a",
      .device = &device(),
      .embed = embed,
      .rms_norm = rms_norm,
      .add_rms_norm = add_rms_norm,
      .rope = rope,
      .quantise = quantise,
      .linear = linear,
      .linear_f32 = linear_f32,
      .route = route,
      .kv_append = kv_append,
      .mla_prefill = mla_prefill,
      .mla_decode = mla_decode,
      .grouped_gemm = grouped_gemm,
      .grouped_gemm_f32 = grouped_gemm_f32,
      .swiglu_quantise = swiglu_quantise,
      .moe_reduce = moe_reduce,
      .moe_combine = moe_combine,
      .sample = sample,
      .grouped_swiglu = grouped_swiglu,
  };
  return kBackend;
}

}  // namespace sortie::cuda
