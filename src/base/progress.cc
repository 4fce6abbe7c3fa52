#include "base/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

namespace sortie {

namespace {
constexpr int kBarWidth = 30;
}

Progress::Progress(std::string what, int64_t total, std::string unit, bool quiet)
    : what_(std::move(what)),
      total_(std::max<int64_t>(total, 1)),
      unit_(std::move(unit)),
      quiet_(quiet),
      terminal_(isatty(STDERR_FILENO) != 0),
      start_(Clock::now()),
      last_draw_(start_) {}

Progress::~Progress() { finish(); }

void Progress::add(int64_t n) {
  const std::lock_guard lock(mutex_);
  done_ += n;
  if (Clock::now() - last_draw_ > seconds(terminal_ ? 0.1 : 5.0)) draw(false);
}

void Progress::note(std::string text) {
  const std::lock_guard lock(mutex_);
  note_ = std::move(text);
}

void Progress::finish() {
  const std::lock_guard lock(mutex_);
  if (std::exchange(finished_, true)) return;
  if (terminal_ || drawn_ || Clock::now() - start_ > seconds(1.0)) draw(true);
}

void Progress::draw(bool last) {
  last_draw_ = Clock::now();
  drawn_ = true;
  if (quiet_) return;
  const double share = std::min(1.0, static_cast<double>(done_) / static_cast<double>(total_));
  const double elapsed = to_seconds(last_draw_ - start_);
  std::string line;
  if (terminal_) {
    const int filled = static_cast<int>(share * kBarWidth);
    line = fmt::format("\r{} [{}{}] {}/{} {} {:.1f} s {}\x1b[K", what_, std::string(filled, '='),
                       std::string(kBarWidth - filled, ' '), done_, total_, unit_, elapsed, note_);
    if (last) line += '\n';
  } else {
    line = fmt::format("{}: {}/{} {} ({:.0f} %), {:.1f} s {}\n", what_, done_, total_, unit_,
                       share * 100, elapsed, note_);
  }
  std::fwrite(line.data(), 1, line.size(), stderr);
  std::fflush(stderr);
}

}  // namespace sortie
