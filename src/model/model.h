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
#include "model/weights.h"
#include "ops/ops.h"

namespace sortie::model {

// A run of consecutive positions of one request in a step.
struct Segment {
  int64_t first_row = 0;          // in the step's rows
  int64_t rows = 0;
  bool prefill = false;           // how its rows attend: mla_prefill or mla_decode
  const int32_t* page_table = nullptr;
};

// One forward of all layers: prompt chunks and decode rows together.
struct Step {
  std::vector<int32_t> ids;        // [rows]
  std::vector<int32_t> positions;  // [rows]
  std::vector<Segment> segments;   // cover all rows, in order
  std::vector<int32_t> logit_rows; // rows whose logits are wanted, ascending
  bool any_prefill_anywhere = false;  // on any rank (exchange mode)
  void clear();
};

// Where a step's time went, in seconds, summed over steps since reset.
struct StepTimes {
  enum Part { kAttention, kRoute, kDispatch, kGemm, kCombine, kDense, kHead, kRest, kParts };
  std::array<double, kParts> seconds{};
  int64_t steps = 0;
  static std::string_view name(Part p);
};

struct ModelOptions {
  int64_t page_size = 64;
  int32_t pages = 0;               // latent cache of this rank
  int64_t decode_segment = 256;    // S; see docs/numerics.md
  int64_t context_length = 0;      // positions that the rope table covers
};

// One rank of a model: weights, cache, backend and its end of the exchange.
class Model {
 public:
  Model(Config config, std::shared_ptr<const Weights> weights, const ops::Backend& backend,
        ThreadPool& threads, exchange::Exchange& exchange, ModelOptions options);

  const Config& config() const { return config_; }
  const ModelOptions& options() const { return options_; }
  exchange::Exchange& exchange() { return exchange_; }

  // Runs the step. Every rank of the group calls this together, with 0 rows where it has none.
  // logits [logit_rows, vocab] and hidden [rows, hidden] (after the final norm) are valid until the
  // next forward.
  struct Output {
    float* logits = nullptr;
    const float* hidden = nullptr;
  };
  Result<Output> forward(const Step& step);

  // One MTP layer over rows that the main model has just seen: hidden [rows, hidden] as forward gave
  // them, next_ids [rows] the token that follows each row. The same segments and positions; the MTP
  // layer has its own cache. Logits [logit_rows, vocab] of the token after the next.
  Result<Output> forward_mtp(int layer, const Step& step, const float* hidden, const int32_t* next_ids);

  // Largest |x| that entered GEMM 1 and GEMM 2 of each layer's experts since construction; filled
  // only if asked for (calibration): index [layer][gemm].
  void record_amax(bool on) { record_amax_ = on; }
  const std::vector<std::array<float, 2>>& expert_amax() const { return amax_; }

  StepTimes& times() { return times_; }

 private:
  struct Rows;  // a step's row-wise arguments
  Status attention(const LayerWeights& w, int layer, const Rows& rows, const float* x, float* out);
  void mlp(const MlpWeights& w, const float* x, int64_t tokens, float* out);
  Status moe(const MoeWeights& w, int layer, const Rows& rows, const float* x, float* out);
  Status decoder_layer(const LayerWeights& w, int layer, const Rows& rows, float* residual, float* x);
  void linear(const LinearWeights& w, const float* x, int64_t x_stride, int64_t tokens, float* y,
              int64_t y_stride);
  Rows make_rows(const Step& step);
  ops::LatentCache cache(int layer);

  const Config config_;
  const std::shared_ptr<const Weights> weights_;
  const ops::Backend& ops_;
  exchange::Exchange& exchange_;
  const ModelOptions options_;
  Arena scratch_;
  ops::Context context_;
  std::vector<float> cos_sin_;
  AlignedBuffer latents_;
  bool record_amax_ = false;
  std::vector<std::array<float, 2>> amax_;
  StepTimes times_;
};

}  // namespace sortie::model
