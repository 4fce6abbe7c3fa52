#include "exchange/waiter.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

namespace sortie::exchange {
namespace {

constexpr auto kSpin = std::chrono::microseconds(20);
// Waits that go straight to sleep after one whose spin was in vain. On a machine whose cores turn
// out to be busy, two ranks on one core spin against each other: 54 us instead of 17 for a dispatch
// and its combine.
constexpr int kRestFromSpinning = 16;
// The longest nap between two looks at the peers' health. Arrivals end a nap earlier.
constexpr auto kNap = std::chrono::milliseconds(20);

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

std::string where(Place place) {
  switch (place.phase) {
    case Phase::kDispatch:
      return fmt::format("in layer {}, dispatch", place.layer);
    case Phase::kCombine:
      return fmt::format("in layer {}, combine", place.layer);
    case Phase::kHeader:
      return "before a step";
    case Phase::kIdle:
      return "while idle";
  }
  return "";
}

// A fault word: bit 0 set, bit 1 "its process has ended", then phase, the lost rank + 1 and the
// layer.
uint64_t encode_fault(int lost, Place place, bool died) {
  return 1U | (died ? 2U : 0U) | static_cast<uint64_t>(place.phase) << 2 |
         static_cast<uint64_t>(lost + 1) << 8 | static_cast<uint64_t>(place.layer) << 32;
}

struct Fault {
  int lost;
  Place place;
  bool died;
};
Fault decode_fault(uint64_t word) {
  return {
      .lost = static_cast<int>(word >> 8 & 0xffffff) - 1,
      .place = {.layer = static_cast<int>(word >> 32), .phase = static_cast<Phase>(word >> 2 & 3)},
      .died = (word & 2) != 0};
}

constexpr const char* kAdvice = "; restart the group (--on-rank-loss fail)";

}  // namespace

Waiter::Waiter(std::shared_ptr<Transport> transport, const Options& options)
    : transport_(std::move(transport)),
      options_(options),
      rank_(transport_->rank()),
      size_(transport_->size()) {}

void Waiter::wake() {
  woken_ = true;
  transport_->wake(rank_);
}

void Waiter::abort() {
  aborted_ = true;
  transport_->wake(rank_);
}

Status Waiter::ready(Place place) {
  if (failure_.is_ok() && aborted_) {
    return fail(Status::cancelled("the exchange was stopped"), -1, place, false);
  }
  return failure_;
}

Status Waiter::fail(Status failure, int lost, Place place, bool died) {
  failure_ = std::move(failure);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) transport_->signal(peer, kFault, encode_fault(lost, place, died));
  }
  return failure_;
}

bool Waiter::arrived(int peer, int index, uint64_t epoch) {
  return transport_->poll(peer, index) >= epoch;
}

Status Waiter::wait_all(int index, uint64_t epoch, Place place) {
  RETURN_IF_ERROR(ready(place));
  uint64_t pending = (size_ == 64 ? 0 : uint64_t{1} << size_) - 1;
  pending &= ~(uint64_t{1} << rank_);
  const TimePoint began = Clock::now();
  if (spin_rest_ > 0) --spin_rest_;
  bool spin = options_.spin && spin_rest_ == 0;
  while (true) {
    for (uint64_t left = pending; left != 0; left &= left - 1) {
      const int peer = std::countr_zero(left);
      if (arrived(peer, index, epoch)) pending &= ~(uint64_t{1} << peer);
    }
    if (pending == 0) return Status::ok();
    if (spin && Clock::now() - began < kSpin) {
      pause();
      continue;
    }
    if (std::exchange(spin, false)) spin_rest_ = kRestFromSpinning;
    RETURN_IF_ERROR(ready(place));
    RETURN_IF_ERROR(check_peers(pending, began, index, epoch, place));
    transport_->sleep(kNap);
  }
}

Result<bool> Waiter::wait_any(int index, uint64_t epoch, Duration most) {
  const Place place{.phase = Phase::kIdle};
  RETURN_IF_ERROR(ready(place));
  const Deadline deadline(most);
  const uint64_t everyone =
      ((size_ == 64 ? 0 : uint64_t{1} << size_) - 1) & ~(uint64_t{1} << rank_);
  while (true) {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_ && arrived(peer, index, epoch)) return true;
    }
    RETURN_IF_ERROR(ready(place));
    if (woken_.exchange(false) || deadline.passed()) return false;
    // An idle rank is never stuck, so the step's deadline does not run.
    RETURN_IF_ERROR(check_peers(everyone, Clock::now(), index, epoch, place));
    transport_->sleep(std::min<Duration>(kNap * 5, deadline.left()));
  }
}

Status Waiter::check_reports(Place place) {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const uint64_t word = transport_->poll(peer, kFault);
    if (word == 0) continue;
    const Fault fault = decode_fault(word);
    if (fault.lost < 0 || fault.lost == rank_) {
      return fail(Status::rank_lost(fmt::format(
                      "rank {} gave up {}{}; its own message says why{}", peer, where(fault.place),
                      fault.lost == rank_ ? " because it could not reach this rank" : "", kAdvice)),
                  peer, place, false);
    }
    return fail(
        Status::rank_lost(fmt::format(
            "rank {} was lost {}: {}, says rank {}{}", fault.lost, where(fault.place),
            fault.died ? "its process has ended" : "no sign of life or progress", peer, kAdvice)),
        fault.lost, fault.place, fault.died);
  }
  return Status::ok();
}

// A process that was itself stopped (SIGSTOP, a laptop's lid) finds old stamps when it goes on, so
// the heartbeats get a moment to catch up before they are believed.
bool Waiter::silent(int peer, Duration& silence) {
  const auto age = [&] { return Clock::now() - transport_->last_life(peer); };
  silence = age();
  if (silence <= options_.exchange_timeout) return false;
  const TimePoint stamp = transport_->last_life(peer);
  const Deadline grace(std::min<Duration>(options_.exchange_timeout / 4, seconds(0.5)));
  while (!grace.passed()) {
    if (transport_->last_life(peer) != stamp) return false;
    transport_->sleep(std::min<Duration>(grace.left(), kNap));
  }
  silence = age();
  return silence > options_.exchange_timeout;
}

Status Waiter::check_peers(uint64_t pending, TimePoint began, int index, uint64_t epoch,
                           Place place) {
  RETURN_IF_ERROR(check_reports(place));
  for (uint64_t left = pending; left != 0; left &= left - 1) {
    const int peer = std::countr_zero(left);
    Duration silence{};
    std::string why;
    const bool died = transport_->dead(peer);
    // What arrived before the end counts: the peer may have finished this phase first.
    if (died && !(place.phase != Phase::kIdle && arrived(peer, index, epoch))) {
      why = "its process has ended";
    } else if (!died && silent(peer, silence)) {
      why = fmt::format("no sign of life for {:.1f} s", to_seconds(silence));
    } else if (!died && Clock::now() - began > options_.step_timeout) {
      why = fmt::format("alive, but stuck for {:.1f} s (--step-timeout)",
                        to_seconds(options_.step_timeout));
    }
    if (why.empty()) continue;
    // A peer that ended because of a third rank has said so.
    RETURN_IF_ERROR(check_reports(place));
    return fail(Status::rank_lost(
                    fmt::format("rank {} was lost {}: {}{}", peer, where(place), why, kAdvice)),
                peer, place, died);
  }
  return Status::ok();
}

}  // namespace sortie::exchange
