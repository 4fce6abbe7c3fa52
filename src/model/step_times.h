#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "base/clock.h"

namespace sortie::model {

// Where the time of steps went, in seconds, summed since construction or clear().
struct StepTimes {
  enum Part : uint8_t {
    kAttention,
    kRoute,
    kDense,  // dense MLPs and shared experts
    kDispatch,
    kGemm1,
    kSwiglu,
    kGemm2,
    kReduce,
    kCombine,
    kHead,
    kSample,
    kRest,
    kParts
  };
  std::array<double, kParts> seconds{};
  int64_t steps = 0;

  static constexpr std::string_view name(Part p) {
    constexpr std::array<std::string_view, kParts> kNames = {
        "attention", "route",  "dense",   "dispatch", "GEMM 1", "swiglu",
        "GEMM 2",    "reduce", "combine", "head",     "sample", "rest"};
    return kNames[p];
  }
  void clear() { *this = {}; }
};

// What a rank did when, for --profile: the newest laps and steps, in order.
class Timeline {
 public:
  struct Event {
    StepTimes::Part part;  // kParts: a whole step
    int32_t what;          // the layer, -1 = none; of a step its rows
    int64_t step;          // counted from 0 on this rank
    int64_t begin;         // ns of this host's Clock
    int64_t end;
  };
  static constexpr size_t kCapacity = size_t{1} << 18;  // 8 MiB

  void add(StepTimes::Part part, int64_t what, TimePoint begin, TimePoint end) {
    const auto ns = [](TimePoint t) {
      return std::chrono::duration_cast<std::chrono::nanoseconds>(t.time_since_epoch()).count();
    };
    const Event event{part, static_cast<int32_t>(what), steps_, ns(begin), ns(end)};
    if (ring_.size() < kCapacity) {
      ring_.push_back(event);
    } else {
      ring_[added_ % kCapacity] = event;
    }
    ++added_;
    if (part == StepTimes::kParts) ++steps_;
  }
  // Oldest first.
  std::vector<Event> events() const {
    std::vector<Event> all;
    all.reserve(ring_.size());
    for (size_t i = added_ - ring_.size(); i < added_; ++i) all.push_back(ring_[i % kCapacity]);
    return all;
  }
  int64_t dropped() const { return static_cast<int64_t>(added_ - ring_.size()); }

 private:
  std::vector<Event> ring_;
  size_t added_ = 0;
  int64_t steps_ = 0;
};

// Charges the time since start() or the last lap to a part. One thread, the step's.
class Laps {
 public:
  explicit Laps(StepTimes& times) : times_(times) {}
  // From here on laps are kept one by one too.
  void record() { timeline_ = std::make_unique<Timeline>(); }
  const Timeline* timeline() const { return timeline_.get(); }

  void start() { last_ = start_ = Clock::now(); }
  void lap(StepTimes::Part part, int layer = -1) {
    const TimePoint now = Clock::now();
    times_.seconds[part] += to_seconds(now - last_);
    if (timeline_) timeline_->add(part, layer, last_, now);
    last_ = now;
  }
  // The step is over: all from start() to the last lap.
  void end_step(int64_t rows) {
    if (timeline_) timeline_->add(StepTimes::kParts, rows, start_, last_);
  }

 private:
  StepTimes& times_;
  std::unique_ptr<Timeline> timeline_;
  TimePoint start_ = Clock::now();
  TimePoint last_ = start_;
};

}  // namespace sortie::model
