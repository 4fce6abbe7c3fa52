#pragma once

#include <cstdint>
#include <string_view>

#include "base/arena.h"
#include "base/exchange_layout.h"
#include "base/threads.h"
#include "quant/matrix.h"

// THE list of operations: each a plain argument struct and one function pointer in Backend. A
// backend is a table of these functions and nothing else. backends/reference judges all others.
//
// Common rules
//   - Activations are fp32 on CPU backends; matrices are [rows, columns], row-major and dense
//   unless
//     a stride is named. Strides count elements.
//   - Every op is a pure function of each row: the bits of a row's result never depend on the other
//     rows, on how many there are, or on the number of threads.
//   - Rows past a count are never read.
namespace sortie::ops {

using quant::Matrix;
using quant::Rows;

// What an op may use beside its arguments. Scratch is given back when the op returns.
struct Context {
  ThreadPool& threads;
  Arena& scratch;
};

// out[t] = table[ids[t]]
struct Embed {
  const int32_t* ids;  // [tokens], each in [0, table.n)
  int64_t tokens;
  Matrix table;  // [vocabulary, hidden], kBf16 or kF32
  float* out;    // [tokens, hidden]
};

// A norm's weight vector, in the checkpoint's own type; `bias` may be null.
struct NormWeight {
  const float* weight = nullptr;  // [n]
  int64_t n = 0;
  float eps = 1e-6f;
};

// y = x / sqrt(mean(x^2) + eps) * weight. Either output may be absent: out null, or quantised.data
// null.
struct RmsNorm {
  const float* x;  // [tokens, x_stride], the first n columns count
  int64_t tokens;
  int64_t x_stride;
  NormWeight norm;
  float* out;      // [tokens, n] or null
  Rows quantised;  // the same rows quantised, or data = null
};

// residual += x, then rms_norm of the sum.
struct AddRmsNorm {
  const float* x;   // [tokens, n]
  float* residual;  // [tokens, n], updated
  int64_t tokens;
  NormWeight norm;
  float* out;      // [tokens, n] or null
  Rows quantised;  // or data = null
};

// Rotates interleaved pairs (2i, 2i+1) of the last `dim` of each head in place.
struct Rope {
  float* x;  // [tokens, heads, head_stride]
  int64_t tokens;
  int64_t heads;
  int64_t head_stride;
  int64_t offset;  // where the rotated part starts in a head
  int64_t dim;
  const int32_t* positions;  // [tokens]
  const float* cos_sin;      // [max position, dim/2, 2]: cos, sin; YaRN's factors are inside
};

// Quantises fp32 rows. amax below 2^-100 gives zeros and scale 0 (docs/numerics.md).
struct Quantise {
  const float* x;  // [out.count, x_stride]
  int64_t x_stride;
  Rows out;  // out.format says how; never kF32
};

// y = x W^T (+ bias). x.format must be act_format(w).
struct Linear {
  Rows x;             // [tokens, k]
  Matrix w;           // [n, k]
  const float* bias;  // [n] or null
  float* y;           // [tokens, y_stride]
  int64_t y_stride;
};

// Scores, choice and weights of the routed experts, fp32 throughout; the lower index wins ties.
enum class Scoring : uint8_t { kSoftmax, kSigmoid };
enum class TopkMethod : uint8_t { kGreedy, kGroupLimitedGreedy, kNoauxTc };
struct Route {
  const float* x;  // [tokens, hidden]
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

// One layer's paged latent cache. Position p of a request lives in page table[p / page_size], row
// p % page_size; a row is [kv_lora_rank latent (normed) | rope_dim roped key], fp32 on CPU.
struct LatentCache {
  float* base = nullptr;  // [pages, page_size, width]
  int64_t page_size = 0;
  int64_t width = 0;  // kv_lora_rank + qk_rope_head_dim
  float* row(int64_t page, int64_t in_page) const {
    return base + (page * page_size + in_page) * width;
  }
};

// kv_a output -> cache rows: rms_norm of the latent, rope of the key part, written in place.
struct KvAppend {
  const float* kv;  // [tokens, kv_stride]: latent, then key part
  int64_t tokens;
  int64_t kv_stride;
  NormWeight norm;  // over the latent: norm.n = kv_lora_rank
  int64_t rope_dim;
  const int32_t* positions;           // [tokens]
  const float* cos_sin;               // as in Rope
  const int32_t* const* page_tables;  // [tokens] the request's page table
  LatentCache cache;
};

// Attention of query rows over a request's latents at positions 0..positions[t]. q is roped. Both
// ops take the same arguments and differ in how they get there:
//   mla_prefill expands keys and values from the cached latents (w_kv_b), for rows that are
//     consecutive positions of one request;
//   mla_decode absorbs W_UK into the query and W_UV into the output; each row is on its own, so a
//     request may have several (1 to 4 on GPUs).
// Keys are walked in blocks of a fixed size counted from position 0; decode cuts them at multiples
// of `segment`, folds each from a fresh state and merges in ascending order. So no result depends
// on the other rows or on how a prompt was cut.
struct Mla {
  const float* q;  // [tokens, heads, nope + rope_dim]
  int64_t tokens;
  int heads;
  int64_t nope;      // qk_nope_head_dim
  int64_t rope_dim;  // qk_rope_head_dim
  int64_t v_dim;     // v_head_dim
  int64_t lora;      // kv_lora_rank
  Matrix w_kv_b;     // [heads * (nope + v_dim), lora], kBf16 or kF32: W_UK then W_UV, head by head
  float scale;       // softmax scale, YaRN's mscale^2 inside
  int64_t segment;   // S, keys a segment (decode)
  const int32_t* positions;           // [tokens]
  const int32_t* const* page_tables;  // [tokens]
  LatentCache cache;
  float* out;  // [tokens, heads * v_dim]
};

// Expert matrices over gathered rows: for local expert e, list entries i in
// [offsets[e], offsets[e+1]), part p: out[i, p*n + j] = x[row_index ? row_index[i] : i] .
// w[e*parts+p][j]. gate and up of GEMM 1 are two parts, down of GEMM 2 is one. All matrices of a
// call have one format and shape.
struct GroupedGemm {
  Rows x;                    // rows are read only where a list names them
  const int32_t* row_index;  // [entries] or null for compact rows
  const int32_t* offsets;    // [local_experts + 1]
  int local_experts;
  const Matrix* w;  // [local_experts * parts]
  int parts;
  float* out;  // [entries, parts * n]
};

// h = silu(gate) * up in fp32: out fp32, or quantised without rounding in between.
struct SwigluQuantise {
  const float* gate_up;  // [rows, 2 * n]: gate, then up
  int64_t rows;
  int64_t n;
  Rows out;  // [rows, n]; kF32 = not quantised
};

// At the experts' rank: for each slot that has entries, sum of weight * row by the combine tree's
// part that lies on this rank (docs/numerics.md). parts of other slots are left alone.
struct MoeReduce {
  ExpertRows lists;
  const float* y;  // [entries, hidden] GEMM 2's rows
  int64_t hidden;
  float* parts;  // [slots, hidden]
};

// At the token's home: parts summed by the tree over ranks, plus the shared expert's row.
struct MoeCombine {
  CombinedParts parts;
  const float* shared;  // [tokens, hidden] or null
  int64_t tokens;
  int64_t hidden;
  float* out;  // [tokens, hidden]; a token with no expert gets shared or zeros
};

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
struct Backend {
  std::string_view name;
  void (*embed)(const Embed&, const Context&);
  void (*rms_norm)(const RmsNorm&, const Context&);
  void (*add_rms_norm)(const AddRmsNorm&, const Context&);
  void (*rope)(const Rope&, const Context&);
  void (*quantise)(const Quantise&, const Context&);
  void (*linear)(const Linear&, const Context&);
  void (*route)(const Route&, const Context&);
  void (*kv_append)(const KvAppend&, const Context&);
  void (*mla_prefill)(const Mla&, const Context&);
  void (*mla_decode)(const Mla&, const Context&);
  void (*grouped_gemm)(const GroupedGemm&, const Context&);
  void (*swiglu_quantise)(const SwigluQuantise&, const Context&);
  void (*moe_reduce)(const MoeReduce&, const Context&);
  void (*moe_combine)(const MoeCombine&, const Context&);
  void (*sample)(const Sample&, const Context&);
};

}  // namespace sortie::ops
