#pragma once

#include <chrono>

namespace sortie {

using Clock = std::chrono::steady_clock;
using Duration = Clock::duration;
using TimePoint = Clock::time_point;

inline Duration seconds(double s) {
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(s));
}
inline double to_seconds(Duration d) { return std::chrono::duration<double>(d).count(); }

// A moment after which a wait gives up. Every wait in Sortie has one.
class Deadline {
 public:
  explicit Deadline(Duration from_now) : at_(Clock::now() + from_now) {}
  explicit Deadline(TimePoint at) : at_(at) {}
  bool passed() const { return Clock::now() >= at_; }
  Duration left() const {
    const Duration d = at_ - Clock::now();
    return d.count() > 0 ? d : Duration::zero();
  }
  TimePoint at() const { return at_; }

 private:
  TimePoint at_;
};

}  // namespace sortie
