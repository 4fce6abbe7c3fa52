#include "cli/signals.h"

#include <unistd.h>

#include <csignal>
#include <utility>

namespace sortie::cli {

namespace {

sigset_t watched() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGTERM);
  return set;
}

}  // namespace

void block_signals() {
  const sigset_t set = watched();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
}

SignalWatch::SignalWatch(std::function<void()> on_signal)
    : thread_([this, on_signal = std::move(on_signal)] {
        const sigset_t set = watched();
        while (!stop_) {
          const timespec wait{.tv_sec = 0, .tv_nsec = 100'000'000};
          const int signal = sigtimedwait(&set, nullptr, &wait);
          if (signal < 0) continue;
          if (caught_.exchange(signal) != 0) _exit(128 + signal);
          on_signal();
        }
      }) {}

SignalWatch::~SignalWatch() {
  stop_ = true;
  thread_.join();
}

}  // namespace sortie::cli
