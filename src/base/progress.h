#pragma once

#include <cstdint>
#include <mutex>
#include <string>

#include "base/clock.h"

namespace sortie {

// Progress of long work on stderr: a bar that redraws on a terminal, a plain line every few seconds
// elsewhere. Thread-safe. Silent if constructed with `quiet`.
class Progress {
 public:
  // `unit` follows the numbers ("MiB", "questions").
  Progress(std::string what, int64_t total, std::string unit, bool quiet = false);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void add(int64_t n);
  // A short remark shown behind the bar.
  void note(std::string text);
  void finish();

 private:
  void draw(bool last);

  std::mutex mutex_;
  const std::string what_;
  const int64_t total_;
  const std::string unit_;
  const bool quiet_;
  const bool terminal_;
  std::string note_;
  int64_t done_ = 0;
  bool finished_ = false;
  bool drawn_ = false;
  const TimePoint start_;
  TimePoint last_draw_;
};

}  // namespace sortie
