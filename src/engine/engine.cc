#include "engine/engine.h"

#include <algorithm>
#include <bit>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "engine/sampler.h"
#include "engine/scheduler.h"

namespace sortie::engine {

namespace {

// An idle rank looks around this often; wake() ends its sleep at once.
constexpr double kIdleSeconds = 1;
constexpr int32_t kStopFlag = 1;  // StepHeader::flags

SchedulerOptions scheduler_options(const model::Model& model, const exchange::Options& x,
                                   const EngineOptions& o) {
  const model::ModelOptions& m = model.options();
  SchedulerOptions s{.max_running_requests = o.max_running_requests,
                     .chunked_prefill_size = o.chunked_prefill_size,
                     .context_length = o.context_length > 0
                                           ? std::min(o.context_length, m.context_length)
                                           : m.context_length,
                     .page_size = m.page_size,
                     .pages = m.pages,
                     .vocab_size = model.config().vocab_size,
                     .eos_token_ids = model.config().eos_token_ids};
  if (model.config().n_routed_experts == 0) return s;  // nothing is dispatched
  // A larger step is cut here, not refused there.
  const bool low_latency = x.mode == exchange::Mode::kLowLatency;
  s.max_step_rows = low_latency ? x.max_dispatch_tokens : x.max_normal_tokens;
  const int64_t decode_rows = x.mode == exchange::Mode::kNormal
                                  ? x.max_normal_tokens
                                  : std::min(x.max_dispatch_tokens, s.max_step_rows);
  s.max_running_requests = static_cast<int>(std::min<int64_t>(s.max_running_requests, decode_rows));
  return s;
}

}  // namespace

FinishReason finish_reason(const Status& status) {
  switch (status.code()) {
    case StatusCode::kOk:
    case StatusCode::kCancelled:
      return FinishReason::kCancelled;
    case StatusCode::kRankLost:
      return FinishReason::kRankLost;
    default:
      return FinishReason::kError;
  }
}

class RankEngine::Loop {
 public:
  Loop(model::Model& model, const EngineOptions& options, Sink sink, Watch watch)
      : model_(model),
        sink_(std::move(sink)),
        watch_(std::move(watch)),
        scheduler_(scheduler_options(model, model.exchange().options(), options), sink_) {}

  ~Loop() {
    if (thread_.joinable()) {
      stop();
      thread_.join();
    } else if (!ended_) {
      end(Status::cancelled("the engine was never started"));
    }
  }

  void start() {
    CHECK(!thread_.joinable(), "a rank is started once");
    thread_ = std::thread([this] { end(run()); });
  }

  void submit(Request request) {
    {
      const std::lock_guard lock(mutex_);
      if (!ended_) {
        inbox_.emplace_back(std::move(request));
        model_.exchange().wake();
        return;
      }
    }
    refuse(request);
  }

  void cancel(uint64_t request) {
    const std::lock_guard lock(mutex_);
    if (ended_) return;
    inbox_.emplace_back(request);
    model_.exchange().wake();
  }

  void stop() {
    const std::lock_guard lock(mutex_);
    if (ended_) return;
    stop_ = true;
    model_.exchange().wake();
  }

  Status join() {
    if (thread_.joinable()) thread_.join();
    const std::lock_guard lock(mutex_);
    return status_;
  }

  RankStats stats() const {
    const std::lock_guard lock(mutex_);
    return stats_;
  }

 private:
  using Message = std::variant<Request, uint64_t>;  // submit, cancel

  Status run();
  Result<bool> step();
  bool drain();
  Status forward(Scheduler::Plan& plan);
  Result<bool> recover(const Status& failure);
  void publish();
  bool degraded() const;
  void end(const Status& status);
  void refuse(const Request& request);

  model::Model& model_;
  const Sink sink_;
  const Watch watch_;
  Scheduler scheduler_;
  Sampler sampler_;
  uint64_t epoch_ = 0;
  std::vector<Message> drained_;
  std::optional<std::span<const Sampled>> unpublished_;  // of a step that may yet turn out void

  mutable std::mutex mutex_;  // guards what follows
  std::vector<Message> inbox_;
  bool stop_ = false;
  bool ended_ = false;
  Status status_;
  RankStats stats_;

  std::thread thread_;
};

Status RankEngine::Loop::run() {
  model_.threads().pin_caller();
  while (true) {
    Result<bool> go_on = step();
    if (!go_on) go_on = recover(go_on.status());
    RETURN_IF_ERROR(go_on.status());
    if (!*go_on) return Status::ok();
  }
}

// Hands submits and cancels to the scheduler, in the order in which they came; true if the group
// shall stop.
bool RankEngine::Loop::drain() {
  bool stop = false;
  {
    const std::lock_guard lock(mutex_);
    drained_.swap(inbox_);
    stop = stop_;
  }
  for (Message& m : drained_) {
    if (auto* request = std::get_if<Request>(&m)) {
      scheduler_.submit(std::move(*request));
    } else {
      scheduler_.cancel(std::get<uint64_t>(m));
    }
  }
  drained_.clear();
  return stop;
}

// One step, or one sleep if there is nothing to do here. False: the group stops.
Result<bool> RankEngine::Loop::step() {
  const bool stop = drain();
  if (!stop && scheduler_.idle()) {
    // Nobody sends a header unless it has work, so a group without any sleeps as a whole, and the
    // first header of a peer calls this rank to the step.
    ASSIGN_OR_RETURN(const bool called, model_.exchange().wait_for_peers(seconds(kIdleSeconds)));
    if (!called) return true;
  }
  Scheduler::Plan& plan = scheduler_.plan();
  ASSIGN_OR_RETURN(const std::span<const exchange::StepHeader> headers,
                   model_.exchange().all_gather({.epoch = ++epoch_,
                                                 .prefill_rows = plan.prefill_rows,
                                                 .decode_rows = plan.decode_rows,
                                                 .flags = stop ? kStopFlag : 0}));
  int64_t rows = 0;
  const uint64_t members = model_.exchange().members();
  for (size_t rank = 0; rank < headers.size(); ++rank) {
    if ((members >> rank & 1) == 0) continue;
    const exchange::StepHeader& h = headers[rank];
    if (h.epoch != epoch_) return Status::internal("the ranks disagree about the step they are in");
    if ((h.flags & kStopFlag) != 0) return false;
  }
  for (const exchange::StepHeader& h : headers) {
    rows += h.prefill_rows + h.decode_rows;
    plan.step.any_prefill_anywhere |= h.prefill_rows > 0;
  }
  if (rows == 0) return true;  // the call was for a request that was cancelled meanwhile
  RETURN_IF_ERROR(forward(plan));
  RETURN_IF_ERROR(model_.exchange().settle());
  publish();
  return true;
}

// After an error: true if the survivors go on, false if the group was stopped meanwhile.
Result<bool> RankEngine::Loop::recover(const Status& failure) {
  const bool was_degraded = degraded();
  const Result<exchange::Recovery> recovery = model_.exchange().recover(failure);
  if (!recovery) {
    if (failure.code() == StatusCode::kRankLost &&
        recovery.status().code() == StatusCode::kCancelled) {
      return false;
    }
    return recovery.status();
  }
  // The step was computed by the members before, or else it is void and planned again.
  if (recovery->step_stands && unpublished_) {
    scheduler_.apply(*unpublished_, was_degraded);
  }
  unpublished_.reset();
  epoch_ = 0;  // the survivors had come to different steps
  for (const exchange::Loss& loss : recovery->lost) {
    if (watch_.peer_lost) watch_.peer_lost(loss);
  }
  return true;
}

void RankEngine::Loop::publish() {
  scheduler_.apply(*std::exchange(unpublished_, std::nullopt), degraded());
}

// Do experts of this model lie on a rank that was lost?
bool RankEngine::Loop::degraded() const {
  const exchange::Exchange& x = model_.exchange();
  return model_.config().n_routed_experts > 0 && std::popcount(x.members()) < x.size();
}

Status RankEngine::Loop::forward(Scheduler::Plan& plan) {
  const TimePoint start = Clock::now();
  ASSIGN_OR_RETURN(const model::Model::Output output, model_.forward(plan.step));
  ASSIGN_OR_RETURN(const auto sampled, sampler_.sample(output.logits, plan.targets, model_));
  model_.laps().lap(model::StepTimes::kSample);
  model_.laps().end_step(plan.prefill_rows + plan.decode_rows);
  const double took = to_seconds(Clock::now() - start);
  {
    const std::lock_guard lock(mutex_);
    ++stats_.steps;
    stats_.prompt_tokens += plan.prefill_rows;
    stats_.generated_tokens += static_cast<int64_t>(sampled.size());
    stats_.preemptions = scheduler_.preemptions();
    if (plan.prefill_rows > 0) {
      stats_.prefill_seconds += took;
    } else if (plan.decode_rows > 0) {
      stats_.decode_seconds += took;
    }
    stats_.times = model_.times();
  }
  unpublished_ = sampled;
  return Status::ok();
}

// The loop is over: whatever is in flight ends with the reason, and so does what comes later.
void RankEngine::Loop::end(const Status& status) {
  model_.exchange().leave(status);
  const FinishReason reason = finish_reason(status);
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
    status_ = status;
    drained_.swap(inbox_);
  }
  scheduler_.end_all(reason, status.message());
  for (const Message& m : drained_) {
    if (const auto* request = std::get_if<Request>(&m)) refuse(*request);
  }
  drained_.clear();
  if (watch_.ended) watch_.ended(status);
}

void RankEngine::Loop::refuse(const Request& request) {
  Event event{.request = request.id};
  {
    const std::lock_guard lock(mutex_);
    event.finish = finish_reason(status_);
    event.error = status_.is_ok() ? "the engine has stopped" : status_.message();
  }
  event.prompt_tokens = static_cast<int64_t>(request.prompt.size());
  sink_(event);
}

RankEngine::RankEngine(model::Model& model, EngineOptions options, Sink sink, Watch watch)
    : loop_(std::make_unique<Loop>(model, options, std::move(sink), std::move(watch))) {}
RankEngine::~RankEngine() = default;

void RankEngine::start() { loop_->start(); }
void RankEngine::submit(Request request) { loop_->submit(std::move(request)); }
void RankEngine::cancel(uint64_t request) { loop_->cancel(request); }
void RankEngine::stop() { loop_->stop(); }
Status RankEngine::join() { return loop_->join(); }
RankStats RankEngine::stats() const { return loop_->stats(); }

}  // namespace sortie::engine
