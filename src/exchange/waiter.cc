#include "exchange/waiter.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

#include "exchange/agreement.h"

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
    case Phase::kSettle:
      return "after a step";
    case Phase::kAgree:
      return "while the ranks agreed on who is left";
  }
  return "";
}

std::string reason(Cause cause, float seconds) {
  switch (cause) {
    case Cause::kEnded:
      return "its process has ended";
    case Cause::kSilent:
      return fmt::format("no sign of life for {:.1f} s", seconds);
    case Cause::kStuck:
      return fmt::format("alive, but stuck for {:.1f} s (--step-timeout)", seconds);
    case Cause::kGaveUp:
      return "it gave up; its own message says why";
    case Cause::kNone:
    case Cause::kHearsay:
      break;
  }
  return "no sign of life or progress";
}

// A fault word: bit 0 set, bit 1 "its process has ended", bits 2 to 4 the phase, 8 to 15 the lost
// rank + 1, 16 to 47 the layer, 48 to 63 the generation + 1. So it grows, and a word of an earlier
// membership is told from a new one.
constexpr int kGenerationShift = 48;
constexpr uint64_t kLeft = ~uint64_t{0} << kGenerationShift;

uint64_t encode_fault(uint64_t generation, int lost, Place place, bool died) {
  return 1U | (died ? 2U : 0U) | static_cast<uint64_t>(place.phase) << 2 |
         static_cast<uint64_t>(lost + 1) << 8 |
         static_cast<uint64_t>(static_cast<uint32_t>(place.layer)) << 16 |
         (generation + 1) << kGenerationShift;
}

uint64_t bit(int rank) { return uint64_t{1} << rank; }
uint64_t everyone(int size) { return size == 64 ? ~uint64_t{0} : bit(size) - 1; }

}  // namespace

std::string sentence(const LossNote& note) {
  return fmt::format("rank {} was lost {}: {}", note.rank, where({note.layer, note.phase}),
                     reason(note.cause, note.seconds));
}

Waiter::Waiter(std::shared_ptr<Transport> transport, const WindowLayout& layout,
               const Options& options)
    : transport_(std::move(transport)),
      layout_(layout),
      options_(options),
      rank_(transport_->rank()),
      size_(transport_->size()),
      members_(everyone(size_)) {}

void Waiter::wake() {
  woken_ = true;
  transport_->wake(rank_);
}

void Waiter::abort() {
  aborted_ = true;
  transport_->wake(rank_);
}

Status Waiter::ready(Place place) {
  if (!failure_.status.is_ok()) return failure_.status;
  if (aborted_) return fail(Status::cancelled("the exchange was stopped"), place);
  // A decision that this rank has not asked for is one that it is out.
  if (options_.on_loss == OnLoss::kDegrade && rank_ != 0 &&
      transport_->poll(0, kAgreed) > generation_) {
    return fence(read_decision(*transport_, layout_, generation_ + 1).notes[rank_]);
  }
  return Status::ok();
}

const char* Waiter::advice(int lost) const {
  if (options_.on_loss == OnLoss::kFail) return "; restart the group (--on-rank-loss fail)";
  if (lost == 0) return "; it holds the front, so the group ends: restart it";
  return "; the group goes on without it (--on-rank-loss degrade), so ask again";
}

Status Waiter::end(Failure failure, uint64_t word) {
  failure_ = std::move(failure);
  for (uint64_t left = others(); left != 0; left &= left - 1) {
    transport_->signal(std::countr_zero(left), kFault, word);
  }
  return failure_.status;
}

Status Waiter::fail(Status own, Place place) {
  return end({.status = std::move(own)}, encode_fault(generation_, -1, place, false));
}

Status Waiter::lose(uint64_t suspects, LossNote note) {
  const bool ends = (suspects & bit(0)) != 0 || note.rank == 0;
  if (ends) note.rank = 0;
  // A rank that gave up is named in other words: its own message is the one to read.
  std::string text = note.cause == Cause::kGaveUp
                         ? fmt::format("rank {} gave up {}; its own message says why", note.rank,
                                       where({note.layer, note.phase}))
                         : sentence(note);
  text += advice(note.rank);
  const uint64_t word =
      encode_fault(generation_, note.rank, {note.layer, note.phase}, note.cause == Cause::kEnded);
  return end({.status = Status::rank_lost(std::move(text)),
              .suspects = suspects,
              .note = note,
              .may_go_on = options_.on_loss == OnLoss::kDegrade && !ends},
             word);
}

Status Waiter::fence(const LossNote& note) {
  failure_ = {.status = Status::rank_lost(fmt::format(
                  "rank {} is out of the group and ends: rank 0 went on without it, since it was "
                  "lost {} ({})",
                  rank_, where({note.layer, note.phase}), reason(note.cause, note.seconds)))};
  return failure_.status;
}

void Waiter::leave() {
  failure_ = {.status = Status::cancelled("this rank has left the group")};
  for (uint64_t left = others(); left != 0; left &= left - 1) {
    transport_->signal(std::countr_zero(left), kFault, kLeft);
  }
}

void Waiter::adopt(uint64_t generation, uint64_t members) {
  generation_ = generation;
  members_ = members;
  failure_ = {};
}

bool Waiter::arrived(int peer, int index, uint64_t epoch) {
  return transport_->poll(peer, index) >= epoch;
}

Status Waiter::wait_all(int index, uint64_t epoch, Place place) {
  RETURN_IF_ERROR(ready(place));
  uint64_t pending = others();
  const TimePoint began = Clock::now();
  if (spin_rest_ > 0) --spin_rest_;
  bool spin = options_.spin && spin_rest_ == 0;
  while (true) {
    for (uint64_t left = pending; left != 0; left &= left - 1) {
      const int peer = std::countr_zero(left);
      if (arrived(peer, index, epoch)) pending &= ~bit(peer);
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
  while (true) {
    for (uint64_t left = others(); left != 0; left &= left - 1) {
      if (arrived(std::countr_zero(left), index, epoch)) return true;
    }
    RETURN_IF_ERROR(ready(place));
    if (woken_.exchange(false) || deadline.passed()) return false;
    // An idle rank is never stuck, so the step's deadline does not run.
    RETURN_IF_ERROR(check_peers(others(), Clock::now(), index, epoch, place));
    transport_->sleep(std::min<Duration>(kNap * 5, deadline.left()));
  }
}

Fault Waiter::fault_of(int peer) const {
  const uint64_t word = transport_->poll(peer, kFault);
  if (word >= kLeft) return {.told = true, .left = true, .ends = true};
  if (word >> kGenerationShift != generation_ + 1) return {};
  Fault fault{.told = true,
              .lost = static_cast<int>(word >> 8 & 0xff) - 1,
              .place = {.layer = static_cast<int>(word >> 16 & 0xffffffff),
                        .phase = static_cast<Phase>(word >> 2 & 7)},
              .died = (word & 2) != 0};
  fault.ends = fault.lost <= 0 || options_.on_loss == OnLoss::kFail;
  return fault;
}

Status Waiter::check_reports() {
  for (uint64_t left = others(); left != 0; left &= left - 1) {
    const int peer = std::countr_zero(left);
    const Fault fault = fault_of(peer);
    if (!fault.told || fault.left) continue;
    LossNote note{.rank = fault.lost,
                  .layer = fault.place.layer,
                  .phase = fault.place.phase,
                  .cause = fault.died ? Cause::kEnded : Cause::kHearsay};
    if (fault.lost < 0 || (fault.lost == rank_ && fault.ends)) {
      note.rank = peer;
      note.cause = Cause::kGaveUp;
      return lose(bit(peer), note);
    }
    // Hearsay is no ground to suspect: rank 0 decides whom to believe. Not even of rank 0, whose
    // decision this rank then waits for.
    if (options_.on_loss == OnLoss::kDegrade) {
      return end(
          {.status = Status::rank_lost(sentence(note) + advice(note.rank)),
           .note = note,
           .may_go_on = true},
          encode_fault(generation_, note.rank == 0 ? peer : note.rank, fault.place, fault.died));
    }
    return end({.status = Status::rank_lost(
                    fmt::format("{}, says rank {}{}", sentence(note), peer, advice(note.rank))),
                .note = note},
               encode_fault(generation_, note.rank, fault.place, fault.died));
  }
  return Status::ok();
}

// A rank of a `local` group may have "ended" by a test's fault; its thread is to behave as if gone.
Status Waiter::check_self(Place place) {
  if (!transport_->dead(rank_)) return Status::ok();
  failure_ = {
      .status = Status::rank_lost(sentence(
          {.rank = rank_, .layer = place.layer, .phase = place.phase, .cause = Cause::kEnded}))};
  return failure_.status;
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

Health Waiter::health(int peer, TimePoint began) {
  if (transport_->dead(peer)) return {.cause = Cause::kEnded};
  Duration silence{};
  if (silent(peer, silence)) {
    return {.cause = Cause::kSilent, .seconds = static_cast<float>(to_seconds(silence))};
  }
  if (Clock::now() - began > options_.step_timeout) {
    return {.cause = Cause::kStuck,
            .seconds = static_cast<float>(to_seconds(options_.step_timeout))};
  }
  return {};
}

Status Waiter::check_peers(uint64_t pending, TimePoint began, int index, uint64_t epoch,
                           Place place) {
  RETURN_IF_ERROR(check_self(place));
  RETURN_IF_ERROR(check_reports());
  uint64_t lost = 0;
  LossNote first;
  for (uint64_t left = pending; left != 0; left &= left - 1) {
    const int peer = std::countr_zero(left);
    const Health health = this->health(peer, began);
    if (health.cause == Cause::kNone) continue;
    // What arrived before the end counts: the peer may have finished this phase first.
    if (health.cause == Cause::kEnded && place.phase != Phase::kIdle &&
        arrived(peer, index, epoch)) {
      continue;
    }
    if (lost == 0) {
      first = {.rank = peer,
               .layer = place.layer,
               .phase = place.phase,
               .cause = health.cause,
               .seconds = health.seconds};
    }
    lost |= bit(peer);
  }
  if (lost == 0) return Status::ok();
  // A peer that ended because of a third rank has said so.
  RETURN_IF_ERROR(check_reports());
  return lose(lost, first);
}

}  // namespace sortie::exchange
