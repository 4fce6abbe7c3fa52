#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/arena.h"
#include "base/status.h"
#include "exchange/exchange.h"
#include "model/config.h"
#include "model/step_times.h"
#include "model/weights.h"
#include "ops/ops.h"

namespace sortie::model {

// A run of consecutive positions of one request in a step.
struct Segment {
  int64_t first_row = 0;  // in the step's rows
  int64_t rows = 0;
  bool prefill = false;  // how its rows attend: mla_prefill or mla_decode
  const int32_t* page_table = nullptr;
};

// One forward of all layers: prompt chunks and decode rows together.
struct Step {
  std::vector<int32_t> ids;           // [rows]
  std::vector<int32_t> positions;     // [rows]
  std::vector<Segment> segments;      // cover all rows, in order
  std::vector<int32_t> logit_rows;    // rows whose logits are wanted, ascending
  bool any_prefill_anywhere = false;  // on any rank (exchange mode)
  void clear();
};

struct ModelOptions {
  int64_t page_size = 64;
  int32_t pages = 0;             // latent cache of this rank
  int64_t decode_segment = 256;  // S; see docs/numerics.md
  int64_t context_length = 0;    // positions that the rope table covers
  bool mtp = false;              // keep a cache for the MTP layers too
};

// One rank of a model: weights, cache, backend and its end of the exchange.
class Model {
 public:
  Model(Config config, std::shared_ptr<const Weights> weights, const ops::Backend& backend,
        ThreadPool& threads, exchange::Exchange& exchange, ModelOptions options);

  const Config& config() const { return config_; }
  const ModelOptions& options() const { return options_; }
  exchange::Exchange& exchange() { return exchange_; }
  const ops::Backend& ops() const { return ops_; }
  // Scratch of the last forward is reused by the next; between them the caller may use the rest.
  const ops::Context& context() const { return context_; }

  struct Output {
    float* logits = nullptr;        // [logit_rows, vocab], overwritable
    const float* hidden = nullptr;  // [rows, hidden] after the final norm
  };
  // Runs the step. Every rank of the group calls this together, with 0 rows where it has none. The
  // output is valid until the next forward.
  Result<Output> forward(const Step& step);

  // One MTP layer over rows that the main model has just seen (same segments and positions; the
  // layer has a cache of its own): hidden [rows, hidden] as forward gave them, next_ids [rows] the
  // token that follows each row. Its logits are of the token after the next.
  Result<Output> forward_mtp(int layer, const Step& step, const float* hidden,
                             const int32_t* next_ids);

  // Calibration: the largest |x| that entered GEMM 1 and GEMM 2 of each routed expert since the
  // last call with true; index [layer][expert]. Only for ep_size 1 and unquantised experts.
  using ExpertAmax = std::vector<std::vector<std::array<float, 2>>>;
  void record_amax(bool on);
  const ExpertAmax& expert_amax() const { return amax_; }

  // Writes small finite values all over the cache: for benchmarks at depth.
  void fill_cache();

  StepTimes& times() { return times_; }

 private:
  // What all layers of a step share.
  struct Shared {
    int64_t tokens;
    const int32_t* positions;           // [tokens]
    const int32_t* const* page_tables;  // [tokens]
    const std::vector<Segment>* segments;
    bool any_prefill_anywhere;
  };
  Shared share(const Step& step);

  // deepseek.cc: the layers, as the paper has them. x is [tokens, hidden], normed; results are new
  // scratch of the same shape.
  const float* attention(const LayerWeights& w, int layer, const Shared& s, const float* x);
  const float* mlp(const MlpWeights& w, const float* x, int64_t tokens);
  Result<const float*> moe(const MoeWeights& w, int layer, const Shared& s, const float* x);
  // residual += delta, then the layer up to its last addition, whose term becomes the new delta
  // (both [tokens, hidden]). The first layer of a stack takes no delta.
  Status decoder_layer(const LayerWeights& w, int layer, const Shared& s, float* residual,
                       float* delta);

  // layers.cc: helpers that pick formats, so that the layers need not.
  quant::Rows rows_for(const quant::Matrix& w, const float* x, int64_t x_stride, int64_t tokens);
  float* linear(const LinearWeights& w, const quant::Rows& x);
  float* linear(const LinearWeights& w, const float* x, int64_t tokens);
  float* norm(const ops::NormWeight& w, const float* x, int64_t x_stride, int64_t tokens);
  float* add_norm(const ops::NormWeight& w, const float* delta, float* residual, int64_t tokens);
  Output head(const quant::Matrix& lm_head, const float* hidden, const std::vector<int32_t>& rows);
  ops::LatentCache cache(int layer);
  void note_amax(int layer, const ExpertRows& lists, const quant::Rows& x, const quant::Rows& h);
  template <typename T>
  T* alloc(int64_t n) {
    return context_.scratch.alloc<T>(n);
  }

  const Config config_;
  const std::shared_ptr<const Weights> weights_;
  const ops::Backend& ops_;
  exchange::Exchange& exchange_;
  const ModelOptions options_;
  Arena scratch_;
  const ops::Context context_;
  const float softmax_scale_;
  const std::vector<float> cos_sin_;
  AlignedBuffer latents_;  // [layers][pages, page_size, width]
  bool record_amax_ = false;
  ExpertAmax amax_;
  StepTimes times_;
  Laps laps_;
};

}  // namespace sortie::model
