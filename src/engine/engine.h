#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "base/status.h"
#include "engine/request.h"
#include "model/model.h"

namespace sortie::engine {

struct EngineOptions {
  int max_running_requests = 16;        // decode rows of a rank
  int64_t chunked_prefill_size = 256;   // prompt rows of a step and rank
  int64_t context_length = 0;
};

// Counters of one rank since start, for --stats.
struct RankStats {
  int64_t steps = 0;
  int64_t prompt_tokens = 0;
  int64_t generated_tokens = 0;
  int64_t preemptions = 0;
  double prefill_seconds = 0;
  double decode_seconds = 0;
  model::StepTimes times;
};

// One rank: its scheduler, pages, requests and the step loop on a thread of its own. Events are
// delivered on that thread, in order. A request always ends with one event that has a reason.
class RankEngine {
 public:
  using Sink = std::function<void(const Event&)>;

  RankEngine(model::Model& model, EngineOptions options, Sink sink);
  ~RankEngine();

  void start();
  // Any thread. A prompt that can never fit ends at once with kError and a sentence.
  void submit(Request request);
  void cancel(uint64_t request);
  // Asks the group to stop after its running requests were cancelled; join() waits for the loop.
  void stop();
  // ok after a stop; the rank-lost sentence (or another failure) otherwise.
  Status join();
  RankStats stats() const;

 private:
  class Loop;
  std::unique_ptr<Loop> loop_;
};

}  // namespace sortie::engine
