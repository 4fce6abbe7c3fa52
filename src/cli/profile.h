#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "model/step_times.h"

// --profile: what every rank did when, on rank 0's clock, as a Chrome trace.
namespace sortie::cli {

struct RankTimeline {
  int rank = 0;
  int64_t to_front_ns = 0;  // to be added to this rank's times to get rank 0's clock
  int64_t dropped = 0;      // events that had to make room for newer ones
  std::vector<model::Timeline::Event> events;
};

RankTimeline timeline_of(int rank, const model::Timeline& timeline, int64_t to_front_ns);

// For the control sockets between processes of the same build.
std::vector<std::byte> encode_timeline(const RankTimeline& timeline);
// A message that encode_timeline cannot have made gives a timeline without events.
RankTimeline decode_timeline(int rank, std::span<const std::byte> message);

// Where the timelines of other processes' ranks come in.
class TimelineInbox {
 public:
  void put(RankTimeline&& timeline);  // a rank's first counts
  // Waits until of each rank in [begin, end) there is a timeline or `gone` says that none is to
  // come, for `most` at most; returns what is there, by rank. `gone` may be true of a rank only
  // after its timeline was put, if it sent one.
  std::vector<RankTimeline> take(int begin, int end, const std::function<bool(int)>& gone,
                                 Duration most);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int, RankTimeline> there_;
};

int64_t now_ns();  // of Clock

// A question for another clock: when it was asked, and what the other said.
struct ClockPing {
  int64_t here = 0;
  int64_t there = 0;
};

// The other clock less this one, from the answer that was fastest: half its round trip bounds the
// error. An offset within that bound is none, so ranks of one host, which share a clock, get 0.
class ClockOffset {
 public:
  void add(const ClockPing& ping, int64_t answered);
  int64_t value() const;
  int count() const { return count_; }

 private:
  int64_t round_trip_ = INT64_MAX;
  int64_t offset_ = 0;
  int count_ = 0;
};

// Refuses a file that cannot be written, before anything is loaded; "" is no file.
Status check_profile(const std::string& path);
// The format of chrome://tracing and Perfetto: a process row per rank, times in microseconds.
std::string chrome_trace(std::span<const RankTimeline> timelines);
Status write_profile(const std::string& path, std::span<const RankTimeline> timelines);

}  // namespace sortie::cli
