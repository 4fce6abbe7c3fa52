#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "base/status.h"
#include "engine/request.h"
#include "model/model.h"

namespace sortie::engine {

struct EngineOptions {
  int max_running_requests = 16;       // decode rows of a rank
  int64_t chunked_prefill_size = 256;  // prompt rows of a step and rank
  int64_t context_length = 0;          // prompt and output of a request; 0 = the model's
};

// Counters of one rank since start, for --stats.
struct RankStats {
  int64_t steps = 0;
  int64_t prompt_tokens = 0;  // rows of prefill, those recomputed after a preemption included
  int64_t generated_tokens = 0;
  int64_t preemptions = 0;
  double prefill_seconds = 0;  // steps in which this rank had prefill rows
  double decode_seconds = 0;   // steps in which it had decode rows alone
  model::StepTimes times;
};

// One rank: its scheduler, pages, requests and the step loop on a thread of its own.
//
// Events are delivered on that thread, in order for each request, and each request ends with
// exactly one that has a reason. Once the loop has ended, submit delivers the last event on the
// caller's thread. The sink may call submit and cancel; it must not call join.
//
// All members may be called from any thread, but start and join by one owner.
class RankEngine {
 public:
  using Sink = std::function<void(const Event&)>;
  // News of the group, on the loop's thread.
  struct Watch {
    std::function<void(const exchange::Loss&)> peer_lost;  // the others go on without that rank
    std::function<void(const Status&)> ended;              // the loop is over, all requests ended
  };

  RankEngine(model::Model& model, EngineOptions options, Sink sink, Watch watch = {});
  ~RankEngine();  // stops the group and joins, if that was not done

  void start();
  // request.id is the caller's and unique among its requests. A prompt that can never fit ends with
  // kError and a sentence before the next step.
  void submit(Request request);
  void cancel(uint64_t request);
  // Asks the group to stop: all ranks leave in the same step and end their requests as kCancelled.
  void stop();
  // Waits for the loop. ok after a stop; the rank-lost sentence (or another failure) otherwise.
  Status join();
  RankStats stats() const;

 private:
  class Loop;
  std::unique_ptr<Loop> loop_;
};

// How a request ends when its rank ends with this status.
FinishReason finish_reason(const Status& status);

}  // namespace sortie::engine
