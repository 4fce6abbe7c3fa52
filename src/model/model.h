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
  int32_t pages = 0;                                 // latent cache of this rank
  quant::Format cache_format = quant::Format::kF32;  // or kBf16; a device's is kBf16
  int64_t decode_segment = 256;                      // S; see docs/numerics.md
  int64_t context_length = 0;                        // positions that the rope table covers
  bool mtp = false;                                  // keep a cache for the MTP layers too
};

// One rank of a model: weights, cache, backend and its end of the exchange. What of it depends on
// the activations' type is in deepseek.h.
class Model {
 public:
  virtual ~Model() = default;
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  const Config& config() const { return config_; }
  const ModelOptions& options() const { return options_; }
  exchange::Exchange& exchange() { return exchange_; }
  ThreadPool& threads() { return threads_; }
  StepTimes& times() { return times_; }
  // forward() starts a step and charges its parts; the driver may add sampling and end the step.
  Laps& laps() { return laps_; }

  struct Output {
    float* logits = nullptr;       // [logit_rows, vocab], overwritable
    const void* hidden = nullptr;  // [rows, hidden] after the final norm, in the activations' type
  };
  // Runs the step. Every rank of the group calls this together, with 0 rows where it has none. The
  // output is valid until the next forward; with a device it is enqueued and in the device's
  // memory.
  virtual Result<Output> forward(const Step& step) = 0;

  // One MTP layer over rows that the main model has just seen (same segments and positions; the
  // layer has a cache of its own): hidden [rows, hidden] as forward gave them, next_ids [rows] the
  // token that follows each row. Its logits are of the token after the next.
  virtual Result<Output> forward_mtp(int layer, const Step& step, const void* hidden,
                                     const int32_t* next_ids) = 0;

  // The op on logits as forward gave them; all else that it names is the host's.
  virtual Status sample(const ops::Sample& args) = 0;
  // `n` values of an output where the host can read them, until the next call; waits for them.
  virtual Result<const float*> on_host(const float* values, int64_t n) = 0;

  // Calibration: the largest |x| that entered GEMM 1 and GEMM 2 of each routed expert since the
  // last call with true; index [layer][expert]. Only for ep_size 1, unquantised experts and host
  // memory.
  using ExpertAmax = std::vector<std::vector<std::array<float, 2>>>;
  virtual void record_amax(bool on) = 0;
  virtual const ExpertAmax& expert_amax() const = 0;

  // Writes small finite values all over the cache: for benchmarks at depth.
  virtual void fill_cache() = 0;

 protected:
  Model(Config config, ThreadPool& threads, exchange::Exchange& exchange, ModelOptions options)
      : config_(std::move(config)), threads_(threads), exchange_(exchange), options_(options) {}

  const Config config_;
  ThreadPool& threads_;
  exchange::Exchange& exchange_;
  const ModelOptions options_;
  StepTimes times_;
  Laps laps_{times_};
};

// `weights` are where the backend wants them: the host's as loaded, a device's from upload.h.
std::unique_ptr<Model> make_model(Config config, std::shared_ptr<const Weights> weights,
                                  const ops::Backend& backend, ThreadPool& threads,
                                  exchange::Exchange& exchange, ModelOptions options);
// A GPU's; `stream` is the one that its exchange uses too.
std::unique_ptr<Model> make_model(Config config, std::shared_ptr<const Weights> weights,
                                  const ops::BackendOf<bf16>& backend, void* stream,
                                  ThreadPool& threads, exchange::Exchange& exchange,
                                  ModelOptions options);

}  // namespace sortie::model
