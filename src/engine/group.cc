#include "engine/group.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace sortie::engine {

Engine::Engine(std::vector<std::unique_ptr<RankLink>> ranks)
    : load_(ranks.size(), 0), ranks_(std::move(ranks)) {
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
                         .lost = [this, rank](const Status& s) { on_lost(rank, s); }});
  }
  started_ = true;
}

uint64_t Engine::submit(Request request, const Sink& sink) {
  const bool known = request.rank < static_cast<int>(ranks_.size());
  size_t rank = 0;
  {
    const std::lock_guard lock(mutex_);
    request.id = ++last_id_;
    if (known) {
      rank = request.rank >= 0 ? static_cast<size_t>(request.rank) : least_loaded();
      ++load_[rank];
      in_flight_[request.id] = {std::make_shared<const Sink>(sink), rank};
    }
  }
  const uint64_t id = request.id;
  if (known) {
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
  return static_cast<size_t>(std::min_element(load_.begin(), load_.end()) - load_.begin());
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
  for (const auto& rank : ranks_) {
    Status status = rank->join();
    if (first.is_ok()) first = std::move(status);
  }
  return first;
}

std::vector<RankStats> Engine::stats() const {
  std::vector<RankStats> all;
  for (const auto& rank : ranks_) all.push_back(rank->stats());
  return all;
}

void Engine::on_event(size_t rank, const Event& event) {
  std::shared_ptr<const Sink> sink;
  {
    const std::lock_guard lock(mutex_);
    const auto it = in_flight_.find(event.request);
    // Ended already, or not this rank's to speak of.
    if (it == in_flight_.end() || it->second.rank != rank) return;
    sink = it->second.sink;
    if (event.finish != FinishReason::kNone) {
      in_flight_.erase(it);
      --load_[rank];
    }
  }
  (*sink)(event);
}

void Engine::on_lost(size_t rank, const Status& status) {
  std::vector<std::pair<uint64_t, std::shared_ptr<const Sink>>> ended;
  {
    const std::lock_guard lock(mutex_);
    for (auto it = in_flight_.begin(); it != in_flight_.end();) {
      if (it->second.rank == rank) {
        ended.emplace_back(it->first, std::move(it->second.sink));
        it = in_flight_.erase(it);
      } else {
        ++it;
      }
    }
    load_[rank] = 0;
  }
  std::sort(ended.begin(), ended.end());  // in the order of submission
  for (const auto& [id, sink] : ended) {
    (*sink)({.request = id, .finish = finish_reason(status), .error = status.message()});
  }
}

}  // namespace sortie::engine
