#include "backends/reference/reference.h"

namespace sortie::reference {

const ops::Backend& backend() {
  // Prefill and decode attention are the same sum here, so both entries are one function.
  static constexpr ops::Backend kBackend = {
      .name = "reference",
      .device = nullptr,
      .embed = embed,
      .rms_norm = rms_norm,
      .add_rms_norm = add_rms_norm,
      .rope = rope,
      .quantise = quantise,
      .linear = linear,
      .linear_f32 = linear,
      .route = route,
      .kv_append = kv_append,
      .mla_prefill = mla,
      .mla_decode = mla,
      .grouped_gemm = grouped_gemm,
      .grouped_gemm_f32 = grouped_gemm,
      .swiglu_quantise = swiglu_quantise,
      .moe_reduce = moe_reduce,
      .moe_combine = moe_combine,
      .sample = sample,
  };
  return kBackend;
}

}  // namespace sortie::reference
