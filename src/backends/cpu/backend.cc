#include "backends/cpu/drivers.h"
#include "backends/cpu/isa.h"
#include "backends/cpu/tiles.h"
#include "backends/reference/reference.h"

namespace sortie::cpu {

namespace {

// A driver with its instruction set bound to it.
template <const Kernels& kernels, auto driver, typename Args>
void bound(const Args& args, const ops::Context& context) {
  driver(args, context, kernels);
}

template <const Kernels& k>
int64_t packed_bytes(const ops::Matrix& w) {
  if (w.layout != quant::Layout::kRows || k.tile_bytes == nullptr) return 0;
  return quant::ceil_div(w.n, kTileColumns) * k.tile_bytes(w.format, w.k);
}

void pack(const ops::Matrix& w, std::byte* codes) {
  const int64_t bytes = tile_bytes(w.format, w.k);
  for (int64_t i = 0; i * kTileColumns < w.n; ++i) pack_tile(w, i, codes + i * bytes);
}

template <const Kernels& k>
constexpr ops::Backend make_backend(std::string_view name) {
  return {
      .name = name,
      .device = nullptr,
      .embed = bound<k, embed, ops::Embed>,
      .rms_norm = bound<k, rms_norm, ops::RmsNorm>,
      .add_rms_norm = bound<k, add_rms_norm, ops::AddRmsNorm>,
      .rope = bound<k, rope, ops::Rope>,
      .quantise = bound<k, quantise, ops::Quantise>,
      .linear = bound<k, linear, ops::Linear>,
      .linear_f32 = bound<k, linear, ops::Linear>,
      .route = bound<k, route, ops::Route>,
      .kv_append = bound<k, kv_append, ops::KvAppend>,
      .mla_prefill = bound<k, mla_prefill, ops::Mla>,
      .mla_decode = bound<k, mla_decode, ops::Mla>,
      .grouped_gemm = bound<k, grouped_gemm, ops::GroupedGemm>,
      .grouped_gemm_f32 = bound<k, grouped_gemm, ops::GroupedGemm>,
      .swiglu_quantise = bound<k, swiglu_quantise, ops::SwigluQuantise>,
      .moe_reduce = bound<k, moe_reduce, ops::MoeReduce>,
      .moe_combine = bound<k, moe_combine, ops::MoeCombine>,
      .sample = reference::sample,
      .packed_bytes = packed_bytes<k>,
      .pack = pack,
  };
}

}  // namespace

#if SORTIE_HAS_AMX
// Here, since a table that is filled at start-up is filled on every processor.
const Kernels kAmxKernels = [] {
  Kernels k = kAvx512Kernels;
  k.prepared_bytes = amx_prepared_bytes;
  k.prepare = amx_prepare;
  k.gemm = amx_gemm;
  k.tile_bytes = nullptr;  // its weights are the left operand, in rows
  return k;
}();
#endif

const ops::Backend& backend(Isa isa) {
  static constexpr ops::Backend kGeneric = make_backend<kGenericKernels>("cpu-generic");
#if defined(__x86_64__)
  static constexpr ops::Backend kAvx2 = make_backend<kAvx2Kernels>("cpu-avx2");
  static constexpr ops::Backend kAvx512bw = make_backend<kAvx512bwKernels>("cpu-avx512bw");
  static constexpr ops::Backend kAvx512 = make_backend<kAvx512Kernels>("cpu-avx512");
  if (isa == Isa::kAvx2) return kAvx2;
  if (isa == Isa::kAvx512bw) return kAvx512bw;
  if (isa == Isa::kAvx512) return kAvx512;
#endif
#if SORTIE_HAS_AMX
  static constexpr ops::Backend kAmx = make_backend<kAmxKernels>("cpu-amx");
  if (isa == Isa::kAmx) return kAmx;
#endif
  CHECK(isa == Isa::kGeneric, "an instruction set that this build does not have");
  return kGeneric;
}

}  // namespace sortie::cpu
