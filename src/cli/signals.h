#pragma once

#include <atomic>
#include <functional>
#include <thread>

namespace sortie::cli {

// Blocks SIGINT and SIGTERM in this thread and all that it starts later; call it before any other.
void block_signals();

// Waits for SIGINT and SIGTERM on a thread of its own: the first calls `on_signal`, a second ends
// the process with 128 + signal.
class SignalWatch {
 public:
  explicit SignalWatch(std::function<void()> on_signal);
  ~SignalWatch();
  // The signal that came, or 0.
  int caught() const { return caught_; }

 private:
  std::atomic<int> caught_{0};
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace sortie::cli
