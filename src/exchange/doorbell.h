#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>

#include "base/clock.h"

namespace sortie::exchange {

// Lets one rank sleep until another rings. It works across processes when it lies in shared memory
// (a futex on the sequence), and a ring costs no system call while nobody sleeps.
struct alignas(64) Doorbell {
  std::atomic<uint32_t> sequence{0};
  std::atomic<uint32_t> sleepers{0};

  void ring() {
    sequence.fetch_add(1);
    if (sleepers.load() != 0) {
      syscall(SYS_futex, reinterpret_cast<uint32_t*>(&sequence), FUTEX_WAKE, INT_MAX, nullptr,
              nullptr, 0);
    }
  }

  // Returns at once if the bell has rung since `seen`, which it then updates: a ring between the
  // caller's last look at the signals and this call is not lost.
  void sleep(uint32_t& seen, Duration most) {
    if (sequence.load() == seen && most.count() > 0) {
      sleepers.fetch_add(1);
      const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(most).count();
      const timespec limit{.tv_sec = static_cast<time_t>(ns / 1'000'000'000),
                           .tv_nsec = static_cast<long>(ns % 1'000'000'000)};
      syscall(SYS_futex, reinterpret_cast<uint32_t*>(&sequence), FUTEX_WAIT, seen, &limit, nullptr,
              0);
      sleepers.fetch_sub(1);
    }
    seen = sequence.load();
  }
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

// One signal word on a cache line of its own, in shared memory for `ucx`.
struct alignas(64) SignalWord {
  std::atomic<uint64_t> epoch{0};
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

}  // namespace sortie::exchange
