#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "exchange/frames.h"

namespace sortie::exchange {

// A file descriptor that closes itself.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~UniqueFd() { reset(); }
  int get() const { return fd_; }
  bool open() const { return fd_ >= 0; }
  void reset();

 private:
  int fd_ = -1;
};

// What the ranks' processes tell each other beside the exchange: start-up blobs, heartbeats, deaths
// and the engine's own frames. The sockets form a star around rank 0; a thread of its own moves the
// bytes, so that a rank shows life while its step computes.
//
// The sockets are inherited pairs on one host and authenticated TCP between hosts
// (launch/rendezvous.h). A frame has at most kMaxFrame bytes; a longer one, like an unknown type,
// ends the connection.
class Control {
 public:
  static constexpr uint32_t kMaxFrame = 64U << 20;
  static constexpr uint32_t kFirstReserved = 1U << 31;  // types from here on are Control's own
  using FrameHandler = std::function<void(int from, uint32_t type, Bytes payload)>;
  using DeathHandler = std::function<void(int rank)>;

  // `links` holds at rank 0 one socket to each other rank (by rank), elsewhere one to rank 0.
  Control(int rank, int size, std::vector<UniqueFd> links);
  ~Control();  // sends what is queued, for two seconds at most, between hosts five
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Queues a frame between rank 0 and another rank; any thread, never blocks. Frames to one rank
  // arrive in order; frames to a dead rank vanish. `type` is below kFirstReserved.
  void send(int to, uint32_t type, std::span<const std::byte> payload);
  // Called on the control thread, in order; frames that came earlier are delivered first. After
  // on_frame(nullptr) returns, the handler before is not running.
  void on_frame(FrameHandler handler);
  void on_death(DeathHandler handler);
  // Called on the control thread at every heartbeat of this rank, for signs of life on other ways.
  void on_beat(std::function<void()> handler);

  // Counts a rank that is linked to this one and silent for that long as dead, so that nothing
  // waits for it any more. For longer than the exchange's own deadline, whose sentence says more.
  void give_up_after(Duration silence) { most_silence_ = silence; }

  // Every rank's blob, by rank. Collective, at start-up; the error names the ranks that never came.
  Result<std::vector<Bytes>> all_gather(std::span<const std::byte> mine, Duration dist_timeout);

  bool dead(int rank) const { return state(rank).dead; }
  TimePoint last_life(int rank) const { return state(rank).life; }

 private:
  struct Link {
    UniqueFd fd;
    FrameReader in{kMaxFrame};
    std::deque<Bytes> out;
    size_t out_sent = 0;    // bytes of out.front() already written
    size_t out_queued = 0;  // bytes in out
    bool network = false;   // TCP
    bool ended = false;     // nothing more is sent; under mutex_
  };
  struct State {
    std::atomic<TimePoint> life{Clock::now()};
    std::atomic<bool> dead{false};
  };
  struct Received {
    int from;
    Frame frame;
  };

  State& state(int rank) { return states_[static_cast<size_t>(rank)]; }
  const State& state(int rank) const { return states_[static_cast<size_t>(rank)]; }
  Link& link(int rank) { return links_[static_cast<size_t>(rank)]; }

  void loop();
  bool idle_or_late(TimePoint stop_by);
  void queue(int to, uint32_t type, std::span<const std::byte> payload);
  void ring();
  void beat();
  void bury_silent();
  void read_from(int peer);
  void write_to(int peer);
  void parse(int peer);
  bool handle(int from, Frame frame);
  void handle_beat(int from, const Bytes& payload);
  void bury(int peer);
  void deliver_backlog();

  const int rank_;
  const int size_;
  std::vector<State> states_;
  std::vector<Link> links_;  // by rank; `in` and `fd` are the thread's, `out` is under mutex_
  Bytes buffer_;             // the thread's, for what a socket has
  std::atomic<Duration> most_silence_{Duration::max()};
  TimePoint last_beat_ = Clock::now();  // the thread's, as the next
  TimePoint awake_since_ = Clock::now();
  UniqueFd bell_;  // eventfd: there is something to send, deliver, or stop for

  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  std::vector<std::deque<Bytes>> gathered_;  // at rank 0 by rank, elsewhere the answers at [0]

  std::mutex handler_mutex_;  // held while a handler runs
  FrameHandler frame_handler_;
  DeathHandler death_handler_;
  std::function<void()> beat_handler_;
  std::deque<Received> backlog_;
  std::vector<int> unreported_deaths_;

  std::thread thread_;
};

}  // namespace sortie::exchange
