// From the ops to the one GEMM.
#include "backends/cuda/gemm.h"

#include "backends/cuda/ops.h"
#include "backends/cuda/sm90_tiles.h"

namespace sortie::cuda {

namespace {

using quant::ActFormat;
using quant::Format;

void set_rows(GemmArgs& g, const quant::Rows& x) {
  g.x = x.data;
  g.x_row_bytes = x.row_bytes();
  g.x_scale_offset = quant::act_scale_offset(x.format, x.k);
  g.static_scale = x.static_scale;
  g.has_row_scale = x.format == ActFormat::kE4m3Token || x.format == ActFormat::kInt8Token;
  g.k = static_cast<int>(x.k);
}

void set_matrix(GemmArgs& g, const quant::Matrix& w) {
  g.w = w.codes;
  g.w_scales = static_cast<const std::byte*>(w.scales);
  g.w_row_bytes = w.code_row_bytes();
  g.n = static_cast<int>(w.n);
}

void set_out(GemmArgs& g, bf16* y) { g.y16 = y; }
void set_out(GemmArgs& g, float* y) { g.y32 = y; }

template <typename T>
void run_linear(const ops::LinearOf<T>& a, const ops::Context& c) {
  CHECK(a.x.k == a.w.k && a.x.format == ops::act_format<bf16>(a.w));
  GemmArgs g{.rows = static_cast<int>(a.x.count), .bias = a.bias, .y_stride = a.y_stride};
  set_rows(g, a.x);
  set_matrix(g, a.w);
  set_out(g, a.y);
  gemm(a.w.format, g, c);
}

// All but where the results go.
GemmArgs grouped_args(const quant::Rows& x, const int32_t* row_index, const int32_t* offsets,
                      int local_experts, const quant::Matrix* w, int parts) {
  CHECK(x.k == w->k && x.format == ops::act_format<bf16>(*w));
  GemmArgs g{.row_index = row_index,
             .offsets = offsets,
             .rows = static_cast<int>(x.count),
             .groups = local_experts,
             .parts = parts,
             .y_stride = parts * w->n};
  set_rows(g, x);
  set_matrix(g, *w);
  if (local_experts * parts > 1) {
    g.w_bytes = w[1].codes - w->codes;
    g.w_scale_bytes =
        static_cast<const std::byte*>(w[1].scales) - static_cast<const std::byte*>(w->scales);
  }
  return g;
}

void packed_gemm(quant::Format format, const GemmArgs& g, const ops::Context& c) {
  if (format == Format::kW4Afp8) return sm90_w4afp8(g, c);
  sm90_w8a8_int8(g, c);
}

template <typename T>
void run_grouped(const ops::GroupedGemmOf<T>& a, const ops::Context& c) {
  if (a.local_experts == 0 || a.x.count == 0) return;
  GemmArgs g = grouped_args(a.x, a.row_index, a.offsets, a.local_experts, a.w, a.parts);
  set_out(g, a.out);
  if (a.w->layout == quant::Layout::kTiles) return packed_gemm(a.w->format, g, c);
  gemm(a.w->format, g, c);
}

bool is_aligned(const void* p, int64_t a, int64_t b) {
  return (reinterpret_cast<uintptr_t>(p) | static_cast<uint64_t>(a | b)) % 16 == 0;
}

}  // namespace

void pack(const quant::Matrix& rows, std::byte* to, void* stream) {
  CHECK(packed_bytes(rows) > 0);
  if (rows.format == Format::kW4Afp8) return pack_w4afp8(rows, to, stream);
  pack_w8a8_int8(rows, to, stream);
}

bool grouped_swiglu(const ops::GroupedSwiglu& a, const ops::Context& c) {
  // A row's dynamic scale needs its maximum first.
  if (a.w->layout != quant::Layout::kTiles || a.out.format != ActFormat::kE4m3Static) return false;
  // What the kernel's division takes.
  if (!(a.out.static_scale > 0x1p-60f && a.out.static_scale < 0x1p60f)) return false;
  if (a.x.count == 0) return true;
  GemmArgs g = grouped_args(a.x, a.row_index, a.offsets, a.local_experts, a.w, 2);
  g.y8 = reinterpret_cast<uint8_t*>(a.out.data);
  g.y8_row_bytes = a.out.row_bytes();
  g.y8_scale = a.out.static_scale;
  packed_gemm(a.w->format, g, c);
  return true;
}

void gemm(Format format, GemmArgs a, const ops::Context& c) {
  a.aligned =
      is_aligned(a.x, a.x_row_bytes, a.x_group_bytes) && is_aligned(a.w, a.w_bytes, a.w_row_bytes);
  switch (format) {
    case Format::kF32:
      return gemm_f32(a, c);
    case Format::kBf16:
      return gemm_bf16(a, c);
    case Format::kFp8Block:
      return gemm_fp8_block(a, c);
    case Format::kW4Afp8:
      return gemm_w4afp8(a, c);
    case Format::kW8A8Int8:
      return gemm_w8a8_int8(a, c);
  }
}

void linear(const ops::LinearOf<bf16>& a, const ops::Context& c) { run_linear(a, c); }
void linear_f32(const ops::LinearOf<float>& a, const ops::Context& c) { run_linear(a, c); }
void grouped_gemm(const ops::GroupedGemmOf<bf16>& a, const ops::Context& c) { run_grouped(a, c); }
void grouped_gemm_f32(const ops::GroupedGemmOf<float>& a, const ops::Context& c) {
  run_grouped(a, c);
}

}  // namespace sortie::cuda
