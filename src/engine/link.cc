#include "engine/link.h"

#include <fmt/format.h>

#include <utility>
#include <variant>

namespace sortie::engine {

void LocalLink::start(LinkEvents to) {
  engine_ = std::make_unique<RankEngine>(
      model_, options_, std::move(to.event),
      RankEngine::Watch{.peer_lost = std::move(to.peer_lost), .ended = std::move(to.lost)});
  engine_->start();
}

RemoteLink::RemoteLink(std::string name, SendFrame send, Duration leave_timeout)
    : name_(std::move(name)), send_(std::move(send)), leave_timeout_(leave_timeout) {}

void RemoteLink::start(LinkEvents to) { to_ = std::move(to); }

Status RemoteLink::on_frame(std::span<const std::byte> frame) {
  Result<Message> message = decode(frame);
  if (!message.is_ok()) {
    leave(Status::rank_lost(fmt::format("{}: {}", name_, message.status().message())));
    return message.status();
  }
  if (const auto* event = std::get_if<Event>(&*message)) {
    to_.event(*event);
  } else if (const auto* stats = std::get_if<RankStats>(&*message)) {
    const std::lock_guard lock(mutex_);
    stats_ = *stats;
  } else if (const auto* left = std::get_if<LeftMessage>(&*message)) {
    leave(left->status);
  } else {
    Status wrong = Status::rank_lost(name_ + " sent a control frame that only a front may send");
    leave(wrong);
    return wrong;
  }
  return Status::ok();
}

void RemoteLink::on_closed() {
  leave(Status::rank_lost(name_ + " closed its control connection before it left the group"));
}

// The first word counts: a connection that closes after the rank has left is no news.
void RemoteLink::leave(const Status& status) {
  {
    const std::lock_guard lock(mutex_);
    if (left_) return;
    left_ = status;
    changed_.notify_all();
  }
  to_.lost(status);
}

void RemoteLink::submit(Request request) {
  std::optional<Status> left;
  {
    const std::lock_guard lock(mutex_);
    left = left_;
  }
  if (!left) return send_(encode(std::move(request)));
  to_.event({.request = request.id,
             .finish = finish_reason(*left),
             .error = left->is_ok() ? "the engine has stopped" : left->message(),
             .prompt_tokens = static_cast<int64_t>(request.prompt.size())});
}

void RemoteLink::cancel(uint64_t request) { send_(encode(CancelMessage{request})); }

void RemoteLink::stop() {
  {
    const std::lock_guard lock(mutex_);
    if (leave_by_) return;
    leave_by_ = Clock::now() + leave_timeout_;
    changed_.notify_all();
  }
  send_(encode(StopMessage{}));
}

// Until a stop the wait may be as long as the service runs; a rank that dies closes its connection.
Status RemoteLink::join() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return left_ || leave_by_; });
  if (!left_) changed_.wait_until(lock, *leave_by_, [&] { return left_.has_value(); });
  if (left_) return *left_;
  lock.unlock();
  leave(Status::rank_lost(fmt::format("{} did not leave within {:.0f} s of the stop", name_,
                                      to_seconds(leave_timeout_))));
  lock.lock();
  return *left_;
}

RankStats RemoteLink::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

RemoteRank::RemoteRank(model::Model& model, EngineOptions options, SendFrame send)
    : send_(std::move(send)),
      engine_(model, options, [this](const Event& event) { on_event(event); }) {}

void RemoteRank::on_event(const Event& event) {
  send_(encode(event));
  if (event.finish == FinishReason::kNone) return;
  send_(encode(engine_.stats()));
  const std::lock_guard lock(mutex_);
  in_flight_.erase(event.request);
}

Status RemoteRank::on_frame(std::span<const std::byte> frame) {
  ASSIGN_OR_RETURN(Message message, decode(frame));
  if (auto* request = std::get_if<Request>(&message)) {
    {
      const std::lock_guard lock(mutex_);
      if (!in_flight_.insert(request->id).second)
        return Status::invalid("a control frame submits a request that is in flight already");
    }
    engine_.submit(std::move(*request));
  } else if (const auto* cancel = std::get_if<CancelMessage>(&message)) {
    engine_.cancel(cancel->request);
  } else if (std::holds_alternative<StopMessage>(message)) {
    engine_.stop();
  } else {
    return Status::invalid("the front sent a control frame that only a rank may send");
  }
  return Status::ok();
}

Status RemoteRank::join() {
  Status status = engine_.join();
  send_(encode(engine_.stats()));
  send_(encode(LeftMessage{status}));
  return status;
}

}  // namespace sortie::engine
