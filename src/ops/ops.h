#pragma once

#include <cstdint>
#include <string_view>
#include <type_traits>

#include "base/arena.h"
#include "base/exchange_layout.h"
#include "base/status.h"
#include "base/threads.h"
#include "quant/matrix.h"

// THE list of operations: each a plain argument struct and one function pointer in Backend. A
// backend is a table of these functions and nothing else. backends/reference judges all others.
//
// Common rules
//   - T is the activations' element type: fp32 on CPU backends, bf16 on GPUs. The plain names
//     (Embed, Linear, …) are the fp32 forms. Matrices are [rows, columns], row-major and dense
//     unless a stride is named. Strides count elements.
//   - A backend with a device takes pointers into the device's memory, enqueues on the context's
//     stream and returns; nothing is waited for.
//   - Every op is a pure function of each row: the bits of a row's result never depend on the other
//     rows, on how many there are, or on the number of threads.
//   - Rows past a count are never read.
namespace sortie::ops {

using quant::Matrix;
using quant::Rows;

// How the model reaches memory that only a backend's kernels may read.
struct Device {
  Memory memory;
  void* (*stream)();  // makes a stream, which lives as long as the process
  // Enqueue copies; the host's side may be reused at once (upload) or after finish (download).
  void (*upload)(void* to, const void* from, size_t bytes, void* stream);
  void (*download)(void* to, const void* from, size_t bytes, void* stream);
  // As Backend's, for the experts' matrices: what `packed_bytes` says follows from shape and format
  // alone; `pack` takes a matrix on the device and enqueues.
  int64_t (*packed_bytes)(const Matrix&);
  void (*pack)(const Matrix&, std::byte* to, void* stream);
  // Waits for the stream and says what failed on it since the last call.
  Status (*finish)(void* stream);
};

// What a linear wants its activations in, when a plain one keeps the activations' type.
template <typename T>
quant::ActFormat act_format(const Matrix& w) {
  const quant::ActFormat f = quant::act_format(w);
  const bool plain = f == quant::ActFormat::kF32;
  return plain && std::is_same_v<T, bf16> ? quant::ActFormat::kBf16 : f;
}
// The rows that `w` wants, without data.
template <typename T>
Rows rows_like(const Matrix& w, int64_t count) {
  return {.format = act_format<T>(w),
          .count = count,
          .k = w.k,
          .static_scale = w.input_scale,
          .static_offset = w.input_offset,
          .ue8m0 = w.ue8m0_activations};
}
// Whether rows that were made for one matrix are what `w` wants too.
template <typename T>
bool fits(const Rows& rows, const Matrix& w) {
  const Rows wanted = rows_like<T>(w, rows.count);
  return rows.format == wanted.format && rows.k == wanted.k &&
         rows.static_scale == wanted.static_scale && rows.static_offset == wanted.static_offset &&
         rows.ue8m0 == wanted.ue8m0;
}
// Rows of T as a matrix: embed then gathers rows.
template <typename T>
constexpr quant::Format kPlainFormat =
    std::is_same_v<T, bf16> ? quant::Format::kBf16 : quant::Format::kF32;

// What an op may use beside its arguments. Scratch is given back when the op returns; on a device
// it is the device's, and work enqueued later may use it again, since a stream keeps its order.
struct Context {
  ThreadPool& threads;
  Arena& scratch;
  void* stream = nullptr;  // of the backend's device
};

// out[t] = table[ids[t]]
template <typename T>
struct EmbedOf {
  const int32_t* ids;  // [tokens], each in [0, table.n)
  int64_t tokens;
  Matrix table;  // [vocabulary, hidden], kBf16 or kF32
  T* out;        // [tokens, hidden]
};
using Embed = EmbedOf<float>;

// A norm's weight vector.
struct NormWeight {
  const float* weight = nullptr;  // [n]
  int64_t n = 0;
  float eps = 1e-6f;
  const float* bias = nullptr;  // [n] or null: smoothed checkpoints (msModelSlim) have one
};

// y = x / sqrt(mean(x^2) + eps) * weight (+ bias). Either output may be absent: out null, or
// quantised.data null.
template <typename T>
struct RmsNormOf {
  const T* x;  // [tokens, x_stride], the first n columns count
  int64_t tokens;
  int64_t x_stride;
  NormWeight norm;
  T* out;                  // [tokens, out_stride] or null
  int64_t out_stride = 0;  // 0 = n
  Rows quantised;          // the same rows quantised, or data = null
};
using RmsNorm = RmsNormOf<float>;

// residual += x, then rms_norm of the sum. The residual is fp32 everywhere: on a GPU it would lose
// in each layer what bf16 cannot hold, and its bytes are few.
template <typename T>
struct AddRmsNormOf {
  const T* x;       // [tokens, n]
  float* residual;  // [tokens, n], updated
  int64_t tokens;
  NormWeight norm;
  T* out;               // [tokens, n] or null
  Rows quantised;       // or data = null
  bool starts = false;  // residual = x: a stack of layers begins
};
using AddRmsNorm = AddRmsNormOf<float>;

// Rotates interleaved pairs (2i, 2i+1) of the last `dim` of each head in place.
template <typename T>
struct RopeOf {
  T* x;  // [tokens, heads, head_stride]
  int64_t tokens;
  int64_t heads;
  int64_t head_stride;
  int64_t offset;  // where the rotated part starts in a head
  int64_t dim;
  const int32_t* positions;  // [tokens]
  const float* cos_sin;      // [max position, dim/2, 2]: cos, sin; YaRN's factors are inside
};
using Rope = RopeOf<float>;

// Quantises rows. amax below 2^-100 gives zeros and scale 0 (docs/numerics.md).
template <typename T>
struct QuantiseOf {
  const T* x;  // [out.count, x_stride]
  int64_t x_stride;
  Rows out;  // out.format says how; a plain format copies
};
using Quantise = QuantiseOf<float>;

// y = x W^T (+ bias). x.format must be act_format<activation>(w); T is the type of the results.
template <typename T>
struct LinearOf {
  Rows x;             // [tokens, k]
  Matrix w;           // [n, k]
  const float* bias;  // [n] or null
  T* y;               // [tokens, y_stride]
  int64_t y_stride;
};
using Linear = LinearOf<float>;

// Scores, choice and weights of the routed experts, fp32 throughout; the lower index wins ties.
enum class Scoring : uint8_t { kSoftmax, kSigmoid };
enum class TopkMethod : uint8_t { kGreedy, kGroupLimitedGreedy, kNoauxTc };
template <typename T>
struct RouteOf {
  const T* x;  // [tokens, hidden]
  int64_t tokens;
  Matrix gate;  // [experts, hidden], kBf16 or kF32
  const float*
      bias;  // [experts] e_score_correction_bias (kNoauxTc) or null: steers the choice only
  Scoring scoring;
  TopkMethod method;
  int groups;       // n_group
  int topk_groups;  // topk_group
  int topk;
  bool normalise;  // norm_topk_prob
  float scaling;   // routed_scaling_factor, applied once, inside the weights
  int32_t* ids;    // [tokens, topk], descending by the score that chose them
  float* weights;  // [tokens, topk]
};
using Route = RouteOf<float>;

// One layer's paged latent cache. Position p of a request lives in page table[p / page_size], row
// p % page_size; a row is [kv_lora_rank latent (normed) | rope_dim roped key].
struct LatentCache {
  std::byte* base = nullptr;  // [pages, page_size, width]
  int64_t page_size = 0;
  int64_t width = 0;                           // kv_lora_rank + qk_rope_head_dim
  quant::Format format = quant::Format::kF32;  // or kBf16, the only one on a device
  int64_t row_bytes() const { return Matrix{.format = format, .k = width}.code_row_bytes(); }
  std::byte* row(int64_t page, int64_t in_page) const {
    return base + (page * page_size + in_page) * row_bytes();
  }
};

// kv_a output -> cache rows: rms_norm of the latent, rope of the key part, rounded once to the
// cache's format.
template <typename T>
struct KvAppendOf {
  const T* kv;  // [tokens, kv_stride]: latent, then key part
  int64_t tokens;
  int64_t kv_stride;
  NormWeight norm;  // over the latent: norm.n = kv_lora_rank
  int64_t rope_dim;
  const int32_t* positions;           // [tokens]
  const float* cos_sin;               // as in Rope
  const int32_t* const* page_tables;  // [tokens] the request's page table
  LatentCache cache;
};
using KvAppend = KvAppendOf<float>;

// Attention of query rows over a request's latents at positions 0..positions[t]. q is roped. Both
// ops take the same arguments and differ in how they get there:
//   mla_prefill expands keys and values from the cached latents (w_kv_b), for rows that are
//     consecutive positions of one request;
//   mla_decode absorbs W_UK into the query and W_UV into the output; each row is on its own, so a
//     request may have several (1 to 4 on GPUs).
// Keys are walked in blocks of a fixed size counted from position 0; decode cuts them at multiples
// of `segment`, folds each from a fresh state and merges in ascending order. So no result depends
// on the other rows or on how a prompt was cut. Over a bf16 cache a backend may round the query in
// latent space and the softmax's exponentials to bf16 too.
template <typename T>
struct MlaOf {
  const T* q;  // [tokens, heads, nope + rope_dim]
  int64_t tokens;
  int heads;
  int64_t nope;      // qk_nope_head_dim
  int64_t rope_dim;  // qk_rope_head_dim
  int64_t v_dim;     // v_head_dim
  int64_t lora;      // kv_lora_rank
  // [heads * (nope + v_dim), lora] in rows, not kW4Afp8: W_UK then W_UV, head by head; quantised
  // codes count as code * scale in fp32. On a device kBf16, and W_UK is transposed: [lora, nope].
  Matrix w_kv_b;
  float scale;               // softmax scale, YaRN's mscale^2 inside
  int64_t segment;           // S, keys a segment (decode)
  int64_t keys;              // no position is at or past this; on a device grids follow from it
  const int32_t* positions;  // [tokens]
  const int32_t* const* page_tables;  // [tokens]
  LatentCache cache;
  T* out;  // [tokens, heads * v_dim]
};
using Mla = MlaOf<float>;

// Expert matrices over gathered rows: for local expert e, list entries i in
// [offsets[e], offsets[e+1]), part p: out[i, p*n + j] = x[row_index ? row_index[i] : i] .
// w[e*parts+p][j]. gate and up of GEMM 1 are two parts, down of GEMM 2 is one. All matrices of a
// call have one format and shape; T is the type of the results.
template <typename T>
struct GroupedGemmOf {
  Rows x;                    // rows are read only where a list names them
  const int32_t* row_index;  // [entries] or null for compact rows
  const int32_t* offsets;    // [local_experts + 1]
  int local_experts;
  const Matrix* w;  // [local_experts * parts]; on a device they stand at equal distances
  int parts;
  T* out;  // [entries, parts * n]
};
using GroupedGemm = GroupedGemmOf<float>;

// h = silu(gate) * up in fp32: out fp32, or quantised without rounding in between.
struct SwigluQuantise {
  const float* gate_up;  // [rows, 2 * n]: gate, then up
  int64_t rows;
  int64_t n;
  Rows out;                        // [rows, n]; a plain format = not quantised
  const int32_t* count = nullptr;  // on a device: how many of the rows count; null = all
};

// GEMM 1 as one op: grouped_gemm_f32 of gate and up, then swiglu_quantise, with the same bits and
// no gate_up in memory.
struct GroupedSwiglu {
  Rows x;
  const int32_t* row_index;  // as in GroupedGemmOf
  const int32_t* offsets;
  int local_experts;
  const Matrix* w;  // [local_experts * 2]
  Rows out;         // [entries, n]
};

// At the experts' rank: for each slot that has entries, sum of weight * row by the combine tree's
// part that lies on this rank (docs/numerics.md). parts of other slots are left alone.
template <typename T>
struct MoeReduceOf {
  ExpertRows lists;
  const T* y;  // [entries, hidden] GEMM 2's rows
  int64_t hidden;
  T* parts;  // [slots, hidden]
};
using MoeReduce = MoeReduceOf<float>;

// At the token's home: parts summed by the tree over ranks, plus the shared expert's row.
template <typename T>
struct MoeCombineOf {
  CombinedParts parts;
  const T* shared;  // [tokens, hidden] or null
  int64_t tokens;
  int64_t hidden;
  T* out;  // [tokens, hidden]; a token with no expert gets shared or zeros
};
using MoeCombine = MoeCombineOf<float>;

// One row's sampling parameters. Order: penalties, temperature, softmax, top-k, top-p, min-p.
struct SampleRow {
  float temperature = 0;  // 0 = greedy: the lowest id of the largest logit
  int top_k = 0;          // 0 = all
  float top_p = 1;
  float min_p = 0;
  float repetition_penalty = 1;
  float presence_penalty = 0;
  float frequency_penalty = 0;
  const int32_t* seen = nullptr;  // [seen_count] ids in the prompt and the output (repetition)
  int64_t seen_count = 0;
  const int32_t* generated = nullptr;  // [generated_count] ids in the output (presence, frequency)
  int64_t generated_count = 0;
  uint64_t seed = 0;  // noise is a counter-based generator keyed by (seed, choice, position)
  uint32_t choice = 0;
  uint32_t position = 0;
};
struct Sample {
  float* logits;  // [rows, vocabulary], overwritten by penalties
  int64_t rows;
  int64_t vocabulary;
  const SampleRow* params;  // [rows]
  int32_t* ids;             // [rows]
  float* logprobs;  // [rows] log-softmax (before temperature and cuts) of the chosen id; or null
};

// A backend. All pointers are set; loading fails early by name where one is not.
template <typename T>
struct BackendOf {
  std::string_view name;
  const Device* device;  // null: host memory
  void (*embed)(const EmbedOf<T>&, const Context&);
  void (*rms_norm)(const RmsNormOf<T>&, const Context&);
  void (*add_rms_norm)(const AddRmsNormOf<T>&, const Context&);
  void (*rope)(const RopeOf<T>&, const Context&);
  void (*quantise)(const QuantiseOf<T>&, const Context&);
  void (*linear)(const LinearOf<T>&, const Context&);
  // With fp32 results, where rounding would hurt: logits, gate and up before SwiGLU.
  void (*linear_f32)(const LinearOf<float>&, const Context&);
  void (*route)(const RouteOf<T>&, const Context&);
  void (*kv_append)(const KvAppendOf<T>&, const Context&);
  void (*mla_prefill)(const MlaOf<T>&, const Context&);
  void (*mla_decode)(const MlaOf<T>&, const Context&);
  void (*grouped_gemm)(const GroupedGemmOf<T>&, const Context&);
  void (*grouped_gemm_f32)(const GroupedGemmOf<float>&, const Context&);
  void (*swiglu_quantise)(const SwigluQuantise&, const Context&);
  void (*moe_reduce)(const MoeReduceOf<T>&, const Context&);
  void (*moe_combine)(const MoeCombineOf<T>&, const Context&);
  void (*sample)(const Sample&, const Context&);

  // Null, or false and nothing done where these operands have no fused form.
  bool (*grouped_swiglu)(const GroupedSwiglu&, const Context&) = nullptr;

  // The layout of weights that this backend's GEMMs are fastest on, made once at load: the bytes of
  // its codes (0 = this matrix stays in rows), and the codes themselves from a matrix in rows.
  // Results have the same bits with either layout. Both null where there is no such layout.
  int64_t (*packed_bytes)(const Matrix&) = nullptr;
  void (*pack)(const Matrix&, std::byte* codes) = nullptr;
};
using Backend = BackendOf<float>;

}  // namespace sortie::ops
