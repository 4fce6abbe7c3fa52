#pragma once

#include "ops/ops.h"

// The ops of this backend, each in the .cu of its kernels.
namespace sortie::cuda {

void embed(const ops::EmbedOf<bf16>& a, const ops::Context& c);
void rms_norm(const ops::RmsNormOf<bf16>& a, const ops::Context& c);
void add_rms_norm(const ops::AddRmsNormOf<bf16>& a, const ops::Context& c);
void rope(const ops::RopeOf<bf16>& a, const ops::Context& c);
void quantise(const ops::QuantiseOf<bf16>& a, const ops::Context& c);
void swiglu_quantise(const ops::SwigluQuantise& a, const ops::Context& c);
void kv_append(const ops::KvAppendOf<bf16>& a, const ops::Context& c);
void linear(const ops::LinearOf<bf16>& a, const ops::Context& c);
void linear_f32(const ops::LinearOf<float>& a, const ops::Context& c);
void grouped_gemm(const ops::GroupedGemmOf<bf16>& a, const ops::Context& c);
void grouped_gemm_f32(const ops::GroupedGemmOf<float>& a, const ops::Context& c);
bool grouped_swiglu(const ops::GroupedSwiglu& a, const ops::Context& c);
void route(const ops::RouteOf<bf16>& a, const ops::Context& c);
void mla_prefill(const ops::MlaOf<bf16>& a, const ops::Context& c);
void mla_decode(const ops::MlaOf<bf16>& a, const ops::Context& c);
void moe_reduce(const ops::MoeReduceOf<bf16>& a, const ops::Context& c);
void moe_combine(const ops::MoeCombineOf<bf16>& a, const ops::Context& c);
void sample(const ops::Sample& a, const ops::Context& c);

}  // namespace sortie::cuda
