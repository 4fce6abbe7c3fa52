#pragma once

#include "backends/cpu/isa.h"
#include "backends/cpu/kernels.h"
#include "ops/ops.h"

// The ops, written once for all instruction sets: shares, tiles and order of work. What is not here
// needs no speed and is the reference's (sample).
namespace sortie::cpu {

// The micro-kernels of a set that isa_missing() has nothing against.
const Kernels& kernels_of(Isa isa);

void embed(const ops::Embed& a, const ops::Context& c, const Kernels& k);
void rms_norm(const ops::RmsNorm& a, const ops::Context& c, const Kernels& k);
void add_rms_norm(const ops::AddRmsNorm& a, const ops::Context& c, const Kernels& k);
void rope(const ops::Rope& a, const ops::Context& c, const Kernels& k);
void quantise(const ops::Quantise& a, const ops::Context& c, const Kernels& k);
void linear(const ops::Linear& a, const ops::Context& c, const Kernels& k);
void route(const ops::Route& a, const ops::Context& c, const Kernels& k);
void kv_append(const ops::KvAppend& a, const ops::Context& c, const Kernels& k);
void mla_prefill(const ops::Mla& a, const ops::Context& c, const Kernels& k);
void mla_decode(const ops::Mla& a, const ops::Context& c, const Kernels& k);
void grouped_gemm(const ops::GroupedGemm& a, const ops::Context& c, const Kernels& k);
void swiglu_quantise(const ops::SwigluQuantise& a, const ops::Context& c, const Kernels& k);
void moe_reduce(const ops::MoeReduce& a, const ops::Context& c, const Kernels& k);
void moe_combine(const ops::MoeCombine& a, const ops::Context& c, const Kernels& k);

// Calls fn(thread, threads): on the whole pool, or on the caller alone where `work`
// (multiplications or so) is too little to wake anyone for. Results do not depend on it.
template <typename F>
void run_shared(const ops::Context& c, int64_t work, F&& fn) {
  constexpr int64_t kWorthSharing = 16384;  // about 2 us, what waking a thread costs
  if (work < kWorthSharing) {
    fn(0, 1);
  } else {
    c.threads.run(fn);
  }
}

// The share of [0, n) of a thread: contiguous, thread 0 the first.
struct Share {
  int64_t begin;
  int64_t end;
};
inline Share share_of(int64_t n, int thread, int threads) {
  return {n * thread / threads, n * (thread + 1) / threads};
}

// x W^T for fp32 rows x of distance x_stride: what route needs of a linear.
void multiply_f32(const float* x, int64_t tokens, int64_t x_stride, const ops::Matrix& w, float* y,
                  int64_t y_stride, const ops::Context& c, const Kernels& k);

// Quantises one fp32 row into row i of `out` (quant/activations.h is the definition).
void quantise_row(const float* x, const ops::Rows& out, int64_t i, const Kernels& k);

}  // namespace sortie::cpu
