#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/request.h"
#include "kv/pages.h"
#include "model/model.h"

namespace sortie::engine {

struct SchedulerOptions {
  int max_running_requests = 16;
  int64_t chunked_prefill_size = 256;  // prompt and recomputed rows of a step
  int64_t max_step_rows = INT64_MAX;   // what the exchange takes, decode rows included
  int64_t context_length = 0;
  int64_t page_size = 64;
  int32_t pages = 0;
  int64_t vocab_size = 0;
  std::vector<int32_t> eos_token_ids;
};

// One row whose logits become a token.
struct SampleTarget {
  const SamplingParams* sampling = nullptr;
  std::span<const int32_t> tokens;  // prompt and output; the new token's position is their number
  int64_t prompt_tokens = 0;
};

// What the sampler made of one target.
struct Sampled {
  int32_t id = -1;
  float logprob = 0;
  std::vector<TokenLogprob> top;
};

// Which rows a rank runs next. A pure state machine: no model, no thread, no clock. One step is
//   plan()   -> rows for the model and targets for the sampler, in the order of logit_rows
//   apply()  <- one token for each target
// and submit and cancel come between steps. plan() may be called again instead of apply() if the
// step was not run. Events go to the sink in order; each request ends with exactly one final event.
//
// First come, first served. A request that is admitted takes pages for all tokens it has; decode
// takes further ones. When they run out, the latest admitted request is preempted: it gives its
// pages back, returns to the front of the queue and later recomputes its latents, the prompt's by
// prefill rows and the output's by decode rows, as they were made at first.
class Scheduler {
 public:
  using Sink = std::function<void(const Event&)>;

  Scheduler(SchedulerOptions options, Sink sink);

  void submit(Request request);
  void cancel(uint64_t request);  // no effect if it has ended
  // Ends all requests.
  void end_all(FinishReason reason, const std::string& error);

  struct Plan {
    model::Step step;
    std::vector<SampleTarget> targets;
    int32_t prefill_rows = 0;  // prompt and recomputed rows
    int32_t decode_rows = 0;   // one for each request that is up to date
  };
  // Valid until the next call of a non-const member. The caller fills in any_prefill_anywhere.
  Plan& plan();
  // degraded: the step ran without some rank's experts, which marks the requests that had rows.
  void apply(std::span<const Sampled> sampled, bool degraded = false);

  bool idle() const { return waiting_.empty() && running_.empty(); }
  size_t running() const { return running_.size(); }
  size_t waiting() const { return waiting_.size(); }
  int32_t free_pages() const { return pool_.free_pages(); }
  int64_t preemptions() const { return preemptions_; }

 private:
  struct Sequence {
    Request request;
    std::vector<int32_t> tokens;  // prompt, then output
    int64_t prompt_tokens = 0;
    int64_t max_new_tokens = 0;  // cut to the room
    int64_t computed = 0;        // positions whose latents are in the cache
    int64_t planned = 0;         // rows of the step that is planned
    bool degraded = false;       // had rows in a step of a smaller group
    kv::PageTable pages;

    int64_t length() const { return static_cast<int64_t>(tokens.size()); }
    int64_t behind() const { return length() - computed; }
    int64_t generated() const { return length() - prompt_tokens; }
  };
  using SequencePtr = std::unique_ptr<Sequence>;

  std::string refusal(const Request& request) const;
  void make_room(size_t index);
  void preempt_last();
  void admit();
  void lay_out();
  bool accept(Sequence& sequence, const Sampled& sampled);
  void end(Sequence& sequence, Event event);

  const SchedulerOptions options_;
  const Sink sink_;
  kv::PagePool pool_;
  std::deque<SequencePtr> waiting_;
  std::vector<SequencePtr> running_;  // in order of admission
  Plan plan_;
  int64_t preemptions_ = 0;
};

}  // namespace sortie::engine
