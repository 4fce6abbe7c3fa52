#include "cli/serving.h"

#include <fmt/format.h>

#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cli/signals.h"

namespace sortie::cli {

namespace {

engine::EngineOptions engine_options(const RunOptions& o) {
  return {.max_running_requests = o.max_running_requests,
          .chunked_prefill_size = o.chunked_prefill_size,
          .context_length = o.context_length};
}

// Frames on the control sockets.
constexpr uint32_t kEngineFrame = 1;
constexpr uint32_t kTimelineFrame = 2;  // to rank 0, behind the last engine frame
constexpr uint32_t kClockFrame = 3;     // the sender's clock, and back with rank 0's behind it
constexpr double kGraceSeconds = 5;
constexpr double kTimelineSeconds = 10;

std::optional<ClockPing> decode_ping(const exchange::Bytes& payload) {
  ClockPing ping;
  if (payload.size() != sizeof ping) return std::nullopt;
  std::memcpy(&ping, payload.data(), sizeof ping);
  return ping;
}

void send_ping(exchange::Control& control, int to, const ClockPing& ping) {
  control.send(to, kClockFrame, std::as_bytes(std::span(&ping, 1)));
}

// Answers on the control thread, so that a busy step does not delay it.
void answer_clock(exchange::Control& control, int from, const exchange::Bytes& payload) {
  auto ping = decode_ping(payload);
  if (!ping) return;
  ping->there = now_ns();
  send_ping(control, from, *ping);
}

// This rank's clock against rank 0's, which answers as long as it serves.
class ClockProbe {
 public:
  explicit ClockProbe(exchange::Control& control) : control_(control) {}

  void on_answer(const exchange::Bytes& payload) {
    const auto ping = decode_ping(payload);
    if (!ping) return;
    const std::lock_guard lock(mutex_);
    offset_.add(*ping, now_ns());
    changed_.notify_all();
  }
  int64_t measure() {
    constexpr int kPings = 16;
    std::unique_lock lock(mutex_);
    for (int i = 1; i <= kPings; ++i) {
      send_ping(control_, 0, {.here = now_ns()});
      if (!changed_.wait_for(lock, seconds(1), [&] { return offset_.count() >= i; })) break;
    }
    return offset_.value();
  }

 private:
  exchange::Control& control_;
  std::mutex mutex_;
  std::condition_variable changed_;
  ClockOffset offset_;
};

}  // namespace

Serving::Serving(Ranks& ranks) : ranks_(ranks) {
  const engine::EngineOptions options = engine_options(ranks.options());
  std::vector<std::unique_ptr<engine::RankLink>> links;
  for (Rank& rank : ranks.local()) {
    links.push_back(std::make_unique<engine::LocalLink>(*rank.model, options));
  }
  std::vector<engine::RemoteLink*> remote;
  while (static_cast<int>(links.size()) < ranks.size()) {
    const auto rank = static_cast<int>(links.size());
    auto link = std::make_unique<engine::RemoteLink>(
        "rank " + std::to_string(rank),
        [&control = ranks.processes()->control(), rank](std::span<const std::byte> frame) {
          control.send(rank, kEngineFrame, frame);
        });
    remote.push_back(link.get());
    links.push_back(std::move(link));
  }
  engine_ = std::make_unique<engine::Engine>(std::move(links), ranks.degrade());
  engine_->start();
  if (!remote.empty()) watch(remote);
}

// Rank r of the links is remote[r - 1]: rank 0 is this process.
void Serving::watch(const std::vector<engine::RemoteLink*>& remote) {
  exchange::Control& control = ranks_.processes()->control();
  control.on_frame(
      [this, &control, remote](int from, uint32_t type, const exchange::Bytes& payload) {
        if (type == kClockFrame) return answer_clock(control, from, payload);
        if (type == kTimelineFrame) return inbox_.put(decode_timeline(from, payload));
        engine::RemoteLink& link = *remote[static_cast<size_t>(from) - 1];
        if (type != kEngineFrame || !link.on_frame(payload).is_ok()) link.on_closed();
      });
  control.on_death([remote](int rank) {
    if (rank > 0) remote[static_cast<size_t>(rank) - 1]->on_closed();
  });
}

Serving::~Serving() {
  if (engine_) (void)finish();
}

Status Serving::finish() {
  engine_->stop();
  Status status = engine_->join();
  stats_ = engine_->stats();
  losses_ = engine_->losses();
  if (!ranks_.options().profile.empty()) collect_timelines();
  if (exchange::ProcessGroup* processes = ranks_.processes()) {
    processes->control().on_frame(nullptr);
    processes->control().on_death(nullptr);
    uint64_t lost = 0;
    for (const exchange::Loss& l : losses_) lost |= uint64_t{1} << l.rank;
    const Status closed = processes->close(seconds(kGraceSeconds), lost);
    if (status.is_ok()) status = closed;
  }
  engine_.reset();
  return status;
}

// This process's ranks have left; those of others send theirs unless they were lost.
void Serving::collect_timelines() {
  for (Rank& rank : ranks_.local()) {
    timelines_.push_back(timeline_of(rank.index, *rank.model->laps().timeline(), 0));
  }
  const auto gone = [this](int rank) {
    return exchange::loss_of(losses_, rank) != nullptr || ranks_.processes()->control().dead(rank);
  };
  for (RankTimeline& t : inbox_.take(static_cast<int>(timelines_.size()), ranks_.size(), gone,
                                     seconds(kTimelineSeconds))) {
    timelines_.push_back(std::move(t));
  }
}

std::string degraded_note(const std::vector<exchange::Loss>& losses, int64_t degraded,
                          int64_t answers) {
  std::string note;
  for (const exchange::Loss& l : losses) note += fmt::format("note: {}\n", l.sentence);
  if (degraded > 0) {
    note += answers == 1 ? "note: the answer is degraded: part of it was computed without the "
                           "experts of lost ranks\n"
                         : fmt::format(
                               "note: {} of {} answers are degraded: part of each was "
                               "computed without the experts of lost ranks\n",
                               degraded, answers);
  }
  return note;
}

Status serve_rank(Ranks& ranks, bool watch_signals) {
  exchange::Control& control = ranks.processes()->control();
  engine::RemoteRank rank(
      *ranks.local()[0].model, engine_options(ranks.options()),
      [&control](std::span<const std::byte> frame) { control.send(0, kEngineFrame, frame); });
  ClockProbe clock(control);
  rank.start();
  control.on_frame([&](int /*from*/, uint32_t type, const exchange::Bytes& payload) {
    if (type == kClockFrame) return clock.on_answer(payload);
    if (type != kEngineFrame || !rank.on_frame(payload).is_ok()) rank.on_closed();
  });
  control.on_death([&rank](int dead) {
    if (dead == 0) rank.on_closed();
  });
  // A rank that a user or a launcher started hears signals itself; the others hear of them from
  // rank 0, to whom the terminal belongs.
  std::unique_ptr<SignalWatch> signals;
  if (watch_signals) signals = std::make_unique<SignalWatch>([&rank] { rank.on_closed(); });
  Status status = rank.join();
  if (signals && signals->caught() != 0) status = Status::cancelled("stopped by a signal");
  if (const model::Timeline* timeline = ranks.local()[0].model->laps().timeline()) {
    const RankTimeline own = timeline_of(control.rank(), *timeline, clock.measure());
    control.send(0, kTimelineFrame, encode_timeline(own));
  }
  control.on_frame(nullptr);
  control.on_death(nullptr);
  // Rank 0 speaks for ranks that it started, but it went on without this one.
  if (ranks.degrade() && !watch_signals && status.code() == StatusCode::kRankLost) {
    fmt::print(stderr, "{}\n", status.message());
  }
  return status;
}

}  // namespace sortie::cli
