#pragma once

#include "ops/ops.h"

// The judge of all backends: one obvious scalar file per op, double accumulation where
// docs/numerics.md fixes no fp32 order, no SIMD, no threads.
namespace sortie::reference {

const ops::Backend& backend();

void embed(const ops::Embed& a, const ops::Context& c);
void rms_norm(const ops::RmsNorm& a, const ops::Context& c);
void add_rms_norm(const ops::AddRmsNorm& a, const ops::Context& c);
void rope(const ops::Rope& a, const ops::Context& c);
void quantise(const ops::Quantise& a, const ops::Context& c);
void linear(const ops::Linear& a, const ops::Context& c);
void route(const ops::Route& a, const ops::Context& c);
void kv_append(const ops::KvAppend& a, const ops::Context& c);
void mla(const ops::Mla& a, const ops::Context& c);
void grouped_gemm(const ops::GroupedGemm& a, const ops::Context& c);
void swiglu_quantise(const ops::SwigluQuantise& a, const ops::Context& c);
void moe_reduce(const ops::MoeReduce& a, const ops::Context& c);
void moe_combine(const ops::MoeCombine& a, const ops::Context& c);
void sample(const ops::Sample& a, const ops::Context& c);

}  // namespace sortie::reference
