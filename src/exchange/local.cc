#include "exchange/local.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <new>
#include <thread>

#include "base/arena.h"
#include "exchange/shared_window.h"

namespace sortie::exchange {
namespace {

constexpr auto kBeat = std::chrono::milliseconds(50);

struct LocalRank {
  AlignedBuffer memory;
  SharedWindow shared;
  std::atomic<TimePoint> life{Clock::now()};
  std::atomic<bool> beating{true};
  std::atomic<bool> sending{true};
  std::atomic<bool> ended{false};
  std::atomic<Duration> delay{Duration::zero()};
  std::atomic<bool> paused{false};
  std::atomic<int> island{0};
  std::atomic<TimePoint> moved{TimePoint{}};
};

class Group final : public FaultControl {
 public:
  Group(int ranks, int64_t window_bytes)
      : window_bytes_(window_bytes), ranks_(static_cast<size_t>(ranks)) {
    const int64_t bytes = SharedWindow::bytes(window_bytes, ranks);
    for (LocalRank& r : ranks_) {
      r.memory = AlignedBuffer(static_cast<size_t>(bytes));
      r.shared = SharedWindow(r.memory.data(), window_bytes, ranks);
      r.shared.start();
    }
    heart_ = std::thread([this] { beat(); });
  }
  ~Group() override {
    {
      const std::scoped_lock lock(mutex_);
      stop_ = true;
    }
    stopped_.notify_all();
    heart_.join();
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  void kill(int rank) override {
    at(rank).beating = false;
    at(rank).sending = false;
  }
  void end(int rank) override {
    kill(rank);
    at(rank).ended = true;
    for (LocalRank& r : ranks_) r.shared.bell().ring();
  }
  void freeze(int rank) override { at(rank).sending = false; }
  void delay(int rank, Duration each_signal) override { at(rank).delay = each_signal; }

  void pause(int rank) override { at(rank).paused = true; }
  void resume(int rank) override {
    at(rank).paused = false;
    at(rank).paused.notify_all();
  }
  void move(int rank, int island) override {
    at(rank).moved = Clock::now();
    at(rank).island = island;
  }

  LocalRank& at(int rank) { return ranks_[static_cast<size_t>(rank)]; }
  int size() const { return static_cast<int>(ranks_.size()); }
  int64_t window_bytes() const { return window_bytes_; }

 private:
  void beat() {
    std::unique_lock lock(mutex_);
    while (!stop_) {
      for (LocalRank& r : ranks_) {
        if (r.beating && !r.paused) r.life = Clock::now();
      }
      stopped_.wait_for(lock, kBeat);
    }
  }

  const int64_t window_bytes_;
  std::vector<LocalRank> ranks_;
  std::mutex mutex_;
  std::condition_variable stopped_;
  bool stop_ = false;
  std::thread heart_;
};

class LocalTransport final : public Transport {
 public:
  LocalTransport(std::shared_ptr<Group> group, int rank) : group_(std::move(group)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return group_->size(); }
  std::byte* window() override { return me().shared.window(); }
  int64_t window_bytes() const override { return group_->window_bytes(); }

  void put(int peer, int64_t offset, const void* data, int64_t bytes) override {
    me().paused.wait(true);
    if (reaches(peer)) group_->at(peer).shared.put(offset, data, bytes);
  }
  void signal(int peer, int index, uint64_t epoch) override {
    if (const Duration d = me().delay; d.count() > 0) std::this_thread::sleep_for(d);
    me().paused.wait(true);
    if (reaches(peer)) group_->at(peer).shared.signal(index, rank_, epoch);
  }
  uint64_t poll(int peer, int index) override { return me().shared.poll(index, peer); }
  void sleep(Duration most) override { me().shared.bell().sleep(seen_, most); }
  void wake(int peer) override { group_->at(peer).shared.bell().ring(); }

  TimePoint last_life(int peer) const override {
    const LocalRank& it = group_->at(peer);
    if (same_island(peer)) return it.life;
    return std::min(it.life.load(), std::max(it.moved.load(), group_->at(rank_).moved.load()));
  }
  // A rank that has ended sees nobody either, so that its thread does not outlive the test.
  bool dead(int peer) const override { return group_->at(peer).ended || group_->at(rank_).ended; }
  std::string lane(int) const override { return "local"; }

 private:
  bool same_island(int peer) const { return group_->at(peer).island == group_->at(rank_).island; }
  bool reaches(int peer) { return me().sending && same_island(peer); }
  LocalRank& me() { return group_->at(rank_); }

  const std::shared_ptr<Group> group_;
  const int rank_;
  uint32_t seen_ = 0;
};

}  // namespace

LocalGroup make_local_group_with_faults(int ranks, int64_t window_bytes) {
  auto group = std::make_shared<Group>(ranks, window_bytes);
  LocalGroup out;
  for (int r = 0; r < ranks; ++r) {
    out.transports.push_back(std::make_shared<LocalTransport>(group, r));
  }
  out.faults = std::move(group);
  return out;
}

std::vector<std::shared_ptr<Transport>> make_local_group(int ranks, int64_t window_bytes) {
  return make_local_group_with_faults(ranks, window_bytes).transports;
}

}  // namespace sortie::exchange
