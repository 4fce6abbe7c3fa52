#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "base/clock.h"

namespace sortie::model {

// Where the time of steps went, in seconds, summed since construction or clear().
struct StepTimes {
  enum Part { kAttention, kRoute, kDispatch, kGemm, kCombine, kDense, kHead, kRest, kParts };
  std::array<double, kParts> seconds{};
  int64_t steps = 0;

  static constexpr std::string_view name(Part p) {
    constexpr std::array<std::string_view, kParts> kNames = {
        "attention", "route", "dispatch", "GEMMs", "combine", "dense", "head", "rest"};
    return kNames[p];
  }
  void clear() { *this = {}; }
};

// Charges the time since start() or the last lap to a part.
class Laps {
 public:
  explicit Laps(StepTimes& times) : times_(times), last_(Clock::now()) {}
  void start() { last_ = Clock::now(); }
  void lap(StepTimes::Part part) {
    const TimePoint now = Clock::now();
    times_.seconds[part] += to_seconds(now - last_);
    last_ = now;
  }

 private:
  StepTimes& times_;
  TimePoint last_;
};

}  // namespace sortie::model
