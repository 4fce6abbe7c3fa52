#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cli/profile.h"
#include "cli/ranks.h"
#include "engine/group.h"

namespace sortie::cli {

// The engine over all ranks of the group, wherever they run; started, stopped at the end of its
// life. Only in the front's process.
class Serving {
 public:
  explicit Serving(Ranks& ranks);
  ~Serving();
  Serving(const Serving&) = delete;
  Serving& operator=(const Serving&) = delete;

  engine::Engine& engine() { return *engine_; }
  // Stops the ranks and waits for them: ok, or why one of them failed.
  Status finish();
  // Of all ranks, as they were when they left.
  const std::vector<engine::RankStats>& stats() const { return stats_; }
  // With --profile, of the ranks that left in order; after finish().
  const std::vector<RankTimeline>& timelines() const { return timelines_; }
  // The ranks that the others went on without (--on-rank-loss degrade), also after finish().
  std::vector<exchange::Loss> losses() const { return engine_ ? engine_->losses() : losses_; }

 private:
  void watch(const std::vector<engine::RemoteLink*>& remote);
  void collect_timelines();

  Ranks& ranks_;
  std::unique_ptr<engine::Engine> engine_;
  std::vector<engine::RankStats> stats_;
  std::vector<exchange::Loss> losses_;
  std::vector<RankTimeline> timelines_;
  TimelineInbox inbox_;
};

// What a command says of ranks that were lost and of answers that lack their experts; "" if there
// is nothing to say.
std::string degraded_note(const std::vector<exchange::Loss>& losses, int64_t degraded,
                          int64_t answers);

// A rank whose front is in another process: serves until the front stops it, or a signal that it
// watches for.
Status serve_rank(Ranks& ranks, bool watch_signals);

}  // namespace sortie::cli
