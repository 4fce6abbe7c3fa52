// Ops on single rows: a block a row, sums in fp32 by one fixed tree, so a row's bits depend on the
// row alone. Bound: the bytes of the row, read and written once; they are far from it where rows
// are few, and small beside the GEMMs.
#include "backends/cuda/kernel.cuh"
#include "backends/cuda/ops.h"
#include "backends/cuda/quantise.cuh"

namespace sortie::cuda {

namespace {

constexpr int kThreads = 256;

__global__ void embed_rows(const int32_t* ids, const std::byte* table, bool table_is_f32, int64_t k,
                           bf16* out) {
  const int64_t t = blockIdx.x;
  const int64_t from = int64_t{ids[t]} * k;
  for (int64_t i = threadIdx.x; i < k; i += kThreads) {
    out[t * k + i] = table_is_f32 ? round_bf16(reinterpret_cast<const float*>(table)[from + i])
                                  : reinterpret_cast<const bf16*>(table)[from + i];
  }
}

// One row of rms_norm: x(i) in fp32 to `out` and, quantised from the rounded values, to `rows`.
template <typename X>
__device__ void norm_row(const X& x, int n, const float* weight, float eps, bf16* out,
                         const RowsOut& rows, int64_t row) {
  extern __shared__ bf16 y[];  // [n], only to quantise from
  __shared__ float space[32];
  float squares = 0;
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) {
    const float v = x(i);
    squares += v * v;
  }
  const float mean = block_sum(squares, space) / static_cast<float>(n);
  const float scale = 1.0f / sqrtf(mean + eps);
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) {
    const bf16 v = round_bf16(x(i) * scale * weight[i]);
    if (out != nullptr) out[i] = v;
    if (rows.data != nullptr) y[i] = v;
  }
  if (rows.data == nullptr) return;
  __syncthreads();
  quantise_row([&](int i) { return f32(y[i]); }, rows, row, space);
}

__global__ void rms_norm_rows(const bf16* x, int64_t x_stride, ops::NormWeight norm, bf16* out,
                              int64_t out_stride, RowsOut rows) {
  const int64_t t = blockIdx.x;
  const bf16* row = x + t * x_stride;
  norm_row([&](int i) { return f32(row[i]); }, static_cast<int>(norm.n), norm.weight, norm.eps,
           out == nullptr ? nullptr : out + t * out_stride, rows, t);
}

__global__ void add_rms_norm_rows(const bf16* x, float* residual, ops::NormWeight norm, bf16* out,
                                  RowsOut rows, bool starts) {
  const int64_t t = blockIdx.x;
  const bf16* row = x + t * norm.n;
  float* sum = residual + t * norm.n;
  // Each thread reads later what it wrote itself.
  for (int64_t i = threadIdx.x; i < norm.n; i += kThreads) {
    sum[i] = starts ? f32(row[i]) : sum[i] + f32(row[i]);
  }
  norm_row([&](int i) { return sum[i]; }, static_cast<int>(norm.n), norm.weight, norm.eps,
           out == nullptr ? nullptr : out + t * norm.n, rows, t);
}

__device__ void rotate(bf16* pair, const float* cos_sin) {
  const float even = f32(pair[0]);
  const float odd = f32(pair[1]);
  pair[0] = round_bf16(even * cos_sin[0] - odd * cos_sin[1]);
  pair[1] = round_bf16(odd * cos_sin[0] + even * cos_sin[1]);
}

__global__ void rope_rows(bf16* x, int64_t heads, int64_t head_stride, int64_t offset, int64_t dim,
                          const int32_t* positions, const float* cos_sin) {
  const int64_t t = blockIdx.x;
  const float* table = cos_sin + int64_t{positions[t]} * dim;
  const int64_t pairs = dim / 2;
  for (int64_t i = threadIdx.x; i < heads * pairs; i += kThreads) {
    const int64_t pair = i % pairs * 2;
    rotate(x + (t * heads + i / pairs) * head_stride + offset + pair, table + pair);
  }
}

__global__ void quantise_rows(const bf16* x, int64_t x_stride, RowsOut out) {
  __shared__ float space[32];
  const bf16* row = x + int64_t{blockIdx.x} * x_stride;
  quantise_row([&](int i) { return f32(row[i]); }, out, blockIdx.x, space);
}

// silu(gate) * up of a row in fp32 all through; rows past *count are not read.
__global__ void swiglu_rows(const float* gate_up, int n, RowsOut out, const int32_t* count) {
  extern __shared__ float h[];  // [n]
  __shared__ float space[32];
  const int64_t t = blockIdx.x;
  if (count != nullptr && t >= *count) return;
  const float* gate = gate_up + t * 2 * n;
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) {
    h[i] = swiglu(gate[i], gate[n + i]);
  }
  __syncthreads();
  quantise_row([&](int i) { return h[i]; }, out, t, space);
}

__global__ void kv_append_rows(const bf16* kv, int64_t kv_stride, ops::NormWeight norm,
                               int64_t rope_dim, const int32_t* positions, const float* cos_sin,
                               const int32_t* const* page_tables, bf16* cache, int64_t page_size,
                               int64_t width) {
  const int64_t t = blockIdx.x;
  const bf16* row = kv + t * kv_stride;
  const int64_t position = positions[t];
  const int64_t page = page_tables[t][position / page_size];
  bf16* to = cache + (page * page_size + position % page_size) * width;
  norm_row([&](int i) { return f32(row[i]); }, static_cast<int>(norm.n), norm.weight, norm.eps, to,
           {}, 0);
  for (int64_t i = int64_t{threadIdx.x} * 2; i < rope_dim; i += kThreads * 2) {
    bf16 pair[2] = {row[norm.n + i], row[norm.n + i + 1]};
    rotate(pair, cos_sin + position * rope_dim + i);
    to[norm.n + i] = pair[0];
    to[norm.n + i + 1] = pair[1];
  }
}

dim3 grid(int64_t rows) { return dim3(static_cast<unsigned>(rows)); }

}  // namespace

void embed(const ops::EmbedOf<bf16>& a, const Context& c) {
  if (a.tokens == 0) return;
  SORTIE_LAUNCH(embed_rows, grid(a.tokens), kThreads, 0, c, a.ids, a.table.codes,
                a.table.format == quant::Format::kF32, a.table.k, a.out);
}

void rms_norm(const ops::RmsNormOf<bf16>& a, const Context& c) {
  if (a.tokens == 0) return;
  const size_t shared = a.quantised.data == nullptr ? 0 : static_cast<size_t>(a.norm.n) * 2;
  allow_shared(rms_norm_rows, shared);
  SORTIE_LAUNCH(rms_norm_rows, grid(a.tokens), kThreads, shared, c, a.x, a.x_stride, a.norm, a.out,
                a.out_stride > 0 ? a.out_stride : a.norm.n, rows_out(a.quantised));
}

void add_rms_norm(const ops::AddRmsNormOf<bf16>& a, const Context& c) {
  if (a.tokens == 0) return;
  const size_t shared = a.quantised.data == nullptr ? 0 : static_cast<size_t>(a.norm.n) * 2;
  allow_shared(add_rms_norm_rows, shared);
  SORTIE_LAUNCH(add_rms_norm_rows, grid(a.tokens), kThreads, shared, c, a.x, a.residual, a.norm,
                a.out, rows_out(a.quantised), a.starts);
}

void rope(const ops::RopeOf<bf16>& a, const Context& c) {
  if (a.tokens == 0) return;
  SORTIE_LAUNCH(rope_rows, grid(a.tokens), kThreads, 0, c, a.x, a.heads, a.head_stride, a.offset,
                a.dim, a.positions, a.cos_sin);
}

void quantise(const ops::QuantiseOf<bf16>& a, const Context& c) {
  if (a.out.count == 0) return;
  SORTIE_LAUNCH(quantise_rows, grid(a.out.count), kThreads, 0, c, a.x, a.x_stride, rows_out(a.out));
}

void swiglu_quantise(const ops::SwigluQuantise& a, const Context& c) {
  if (a.rows == 0) return;
  const size_t shared = static_cast<size_t>(a.n) * sizeof(float);
  allow_shared(swiglu_rows, shared);
  SORTIE_LAUNCH(swiglu_rows, grid(a.rows), kThreads, shared, c, a.gate_up, static_cast<int>(a.n),
                rows_out(a.out), a.count);
}

void kv_append(const ops::KvAppendOf<bf16>& a, const Context& c) {
  if (a.tokens == 0) return;
  SORTIE_LAUNCH(kv_append_rows, grid(a.tokens), kThreads, 0, c, a.kv, a.kv_stride, a.norm,
                a.rope_dim, a.positions, a.cos_sin, a.page_tables,
                reinterpret_cast<bf16*>(a.cache.base), a.cache.page_size, a.cache.width);
}

}  // namespace sortie::cuda
