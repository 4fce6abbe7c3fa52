#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "engine/link.h"

namespace sortie::engine {

// The front of a group of ranks, in rank 0's process: takes requests, gives each to one rank for
// life, and brings its events back.
//
// A sink runs on the thread of its rank (or of the connection to it), in order; it may run before
// submit returns. It ends with exactly one event that has a reason, whatever happens to the rank.
// It may call submit and cancel. Other members may be called from any thread, start and join by one
// owner.
class Engine {
 public:
  using Sink = std::function<void(const Event&)>;

  // With degrade, a rank that is gone is no failure of the group as long as rank 0 goes on.
  explicit Engine(std::vector<std::unique_ptr<RankLink>> ranks, bool degrade = false);
  ~Engine();  // stops and joins, if that was not done
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  void start();
  // Serves on request.rank, or where the fewest requests are in flight (the lowest rank among
  // equals). request.id is chosen here and returned.
  uint64_t submit(Request request, const Sink& sink);
  void cancel(uint64_t request);
  void stop();
  // Waits for all ranks: ok after a stop, otherwise the failure of the lowest rank that has one;
  // ranks that the others went on without do not count.
  Status join();
  std::vector<RankStats> stats() const;
  // The ranks that the others went on without, in the order of their loss.
  std::vector<exchange::Loss> losses() const;

 private:
  // Its rank speaks of a request, and rank 0 of the loss of that rank: one at a time.
  struct Stream {
    explicit Stream(const Sink& s) : sink(s) {}
    void deliver(const Event& event);
    const Sink sink;
    std::mutex mutex;
    bool over = false;
    bool degraded = false;
  };
  struct InFlight {
    std::shared_ptr<Stream> stream;
    size_t rank = 0;
  };
  size_t least_loaded() const;  // with mutex_ held
  bool is_gone(size_t rank) const;
  const exchange::Loss* loss_of(size_t rank) const;
  void on_event(size_t rank, const Event& event);
  void on_lost(size_t rank, const Status& status);
  void on_peer_lost(const exchange::Loss& loss);
  void end_requests(size_t rank, const Status& status);

  const bool degrade_;
  mutable std::mutex mutex_;
  uint64_t last_id_ = 0;  // guarded by mutex_, as those up to started_
  std::unordered_map<uint64_t, InFlight> in_flight_;
  std::vector<int64_t> load_;  // requests in flight, by rank
  std::vector<exchange::Loss> losses_;
  std::vector<std::optional<Status>> silent_;  // gone, but rank 0 has not said why yet
  bool front_over_ = false;
  bool started_ = false;
  std::vector<std::unique_ptr<RankLink>> ranks_;  // last: their threads use the rest
};

}  // namespace sortie::engine
