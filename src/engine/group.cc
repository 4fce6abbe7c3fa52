#include "engine/group.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace sortie::engine {

namespace {

Status lost_for_requests(const exchange::Loss& loss) {
  return Status::rank_lost(loss.sentence + "; the group goes on without it, so ask again");
}

}  // namespace

Engine::Engine(std::vector<std::unique_ptr<RankLink>> ranks, bool degrade)
    : degrade_(degrade), load_(ranks.size(), 0), silent_(ranks.size()), ranks_(std::move(ranks)) {
  CHECK(!ranks_.empty());
}

Engine::~Engine() {
  if (!started_) return;
  stop();
  (void)join();
}

void Engine::start() {
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    ranks_[rank]->start({.event = [this, rank](const Event& e) { on_event(rank, e); },
                         .lost = [this, rank](const Status& s) { on_lost(rank, s); },
                         .peer_lost = [this](const exchange::Loss& l) { on_peer_lost(l); }});
  }
  started_ = true;
}

uint64_t Engine::submit(Request request, const Sink& sink) {
  const bool known = request.rank < static_cast<int>(ranks_.size());
  size_t rank = 0;
  std::string gone;
  {
    const std::lock_guard lock(mutex_);
    request.id = ++last_id_;
    if (known) {
      rank = request.rank >= 0 ? static_cast<size_t>(request.rank) : least_loaded();
      if (const exchange::Loss* loss = loss_of(rank)) gone = lost_for_requests(*loss).message();
    }
    if (known && gone.empty()) {
      ++load_[rank];
      in_flight_[request.id] = {std::make_shared<Stream>(sink), rank};
    }
  }
  const uint64_t id = request.id;
  if (!gone.empty()) {
    sink({.request = id,
          .finish = FinishReason::kRankLost,
          .error = gone,
          .prompt_tokens = static_cast<int64_t>(request.prompt.size())});
  } else if (known) {
    ranks_[rank]->submit(std::move(request));
  } else {
    sink({.request = id,
          .finish = FinishReason::kError,
          .error = fmt::format("the request asks for rank {}, but the last rank is {}",
                               request.rank, ranks_.size() - 1)});
  }
  return id;
}

size_t Engine::least_loaded() const {
  size_t best = 0;  // never lost: the group would be over
  for (size_t rank = 1; rank < load_.size(); ++rank) {
    if (!is_gone(rank) && load_[rank] < load_[best]) best = rank;
  }
  return best;
}

bool Engine::is_gone(size_t rank) const { return silent_[rank] || loss_of(rank) != nullptr; }

const exchange::Loss* Engine::loss_of(size_t rank) const {
  return exchange::loss_of(losses_, static_cast<int>(rank));
}

void Engine::cancel(uint64_t request) {
  size_t rank = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto it = in_flight_.find(request);
    if (it == in_flight_.end()) return;
    rank = it->second.rank;
  }
  ranks_[rank]->cancel(request);
}

void Engine::stop() {
  for (const auto& rank : ranks_) rank->stop();
}

Status Engine::join() {
  Status first;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    Status status = ranks_[rank]->join();
    const std::lock_guard lock(mutex_);
    if (first.is_ok() && loss_of(rank) == nullptr) first = std::move(status);
  }
  return first;
}

std::vector<exchange::Loss> Engine::losses() const {
  const std::lock_guard lock(mutex_);
  return losses_;
}

std::vector<RankStats> Engine::stats() const {
  std::vector<RankStats> all;
  for (const auto& rank : ranks_) all.push_back(rank->stats());
  return all;
}

void Engine::Stream::deliver(const Event& event) {
  const std::lock_guard lock(mutex);
  if (over) return;
  over = event.finish != FinishReason::kNone;
  degraded |= event.degraded;
  if (event.degraded == degraded) return sink(event);
  Event marked = event;  // the front's own last word of a lost rank does not know
  marked.degraded = true;
  sink(marked);
}

void Engine::on_event(size_t rank, const Event& event) {
  std::shared_ptr<Stream> stream;
  {
    const std::lock_guard lock(mutex_);
    const auto it = in_flight_.find(event.request);
    // Ended already, or not this rank's to speak of.
    if (it == in_flight_.end() || it->second.rank != rank) return;
    stream = it->second.stream;
    if (event.finish != FinishReason::kNone) {
      in_flight_.erase(it);
      --load_[rank];
    }
  }
  stream->deliver(event);
}

// A rank is gone. With degrade, rank 0 finds that out too and says more: its sentence is the one
// that the requests end with, unless rank 0 ends first.
void Engine::on_lost(size_t rank, const Status& status) {
  std::vector<std::pair<size_t, Status>> ended;
  {
    const std::lock_guard lock(mutex_);
    if (degrade_ && rank != 0 && !front_over_) {
      silent_[rank] = status;
      return;
    }
    ended.emplace_back(rank, status);
    if (rank == 0) {
      front_over_ = true;
      for (size_t r = 1; r < silent_.size(); ++r) {
        if (silent_[r]) ended.emplace_back(r, *silent_[r]);
      }
    }
  }
  for (const auto& [r, why] : ended) end_requests(r, why);
}

void Engine::on_peer_lost(const exchange::Loss& loss) {
  const auto rank = static_cast<size_t>(loss.rank);
  {
    const std::lock_guard lock(mutex_);
    if (loss_of(rank) != nullptr) return;
    losses_.push_back(loss);
  }
  end_requests(rank, lost_for_requests(loss));
  ranks_[rank]->lose(lost_for_requests(loss));
}

void Engine::end_requests(size_t rank, const Status& status) {
  std::vector<std::pair<uint64_t, std::shared_ptr<Stream>>> ended;
  {
    const std::lock_guard lock(mutex_);
    for (auto it = in_flight_.begin(); it != in_flight_.end();) {
      if (it->second.rank == rank) {
        ended.emplace_back(it->first, std::move(it->second.stream));
        it = in_flight_.erase(it);
      } else {
        ++it;
      }
    }
    load_[rank] = 0;
  }
  std::sort(ended.begin(), ended.end());  // in the order of submission
  for (const auto& [id, stream] : ended) {
    stream->deliver({.request = id, .finish = finish_reason(status), .error = status.message()});
  }
}

}  // namespace sortie::engine
