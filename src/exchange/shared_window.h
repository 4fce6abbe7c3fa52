#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>

#include "exchange/doorbell.h"
#include "exchange/transport.h"

namespace sortie::exchange {

// A rank's window with its signal words and doorbell, in memory that its peers can write: the heap
// for `local`, a shared segment for `ucx`.
//
//   window   [window_bytes], rounded up to 64
//   words    [kSignals * ranks] SignalWord, by (signal, source rank)
//   bell     Doorbell
//   life     Life
class SharedWindow {
 public:
  static int64_t bytes(int64_t window_bytes, int ranks) {
    return rounded(window_bytes) + kSignals * ranks * static_cast<int64_t>(sizeof(SignalWord)) +
           static_cast<int64_t>(sizeof(Doorbell) + sizeof(Life));
  }

  SharedWindow() = default;
  // `base` is 64-byte aligned. The owner calls start() once, before any peer knows the place.
  SharedWindow(std::byte* base, int64_t window_bytes, int ranks)
      : window_(base),
        words_(reinterpret_cast<SignalWord*>(base + rounded(window_bytes))),
        bell_(reinterpret_cast<Doorbell*>(words_ + static_cast<ptrdiff_t>(kSignals) * ranks)),
        life_(reinterpret_cast<Life*>(bell_ + 1)),
        ranks_(ranks) {}
  void start() {
    for (int i = 0; i < kSignals * ranks_; ++i) new (words_ + i) SignalWord;
    new (bell_) Doorbell;
    new (life_) Life;
  }

  // The owner's sign of life, for peers of its host: they share its clock.
  void live() const {
    life_->stamp.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
  }
  TimePoint life() const {
    return TimePoint(Duration(life_->stamp.load(std::memory_order_relaxed)));
  }

  std::byte* window() const { return window_; }
  Doorbell& bell() const { return *bell_; }

  void put(int64_t offset, const void* data, int64_t bytes) const {
    if (bytes > 0) std::memcpy(window_ + offset, data, static_cast<size_t>(bytes));
  }
  void signal(int index, int source, uint64_t epoch) const {
    words_[index * ranks_ + source].epoch.store(epoch, std::memory_order_release);
    bell_->ring();
  }
  uint64_t poll(int index, int source) const {
    return words_[index * ranks_ + source].epoch.load(std::memory_order_acquire);
  }

 private:
  struct alignas(64) Life {
    std::atomic<Duration::rep> stamp{0};
  };

  static int64_t rounded(int64_t n) { return (n + 63) / 64 * 64; }

  std::byte* window_ = nullptr;
  SignalWord* words_ = nullptr;
  Doorbell* bell_ = nullptr;
  Life* life_ = nullptr;
  int ranks_ = 0;
};

}  // namespace sortie::exchange
