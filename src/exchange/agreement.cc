#include "exchange/agreement.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

namespace sortie::exchange {
namespace {

constexpr auto kNap = std::chrono::milliseconds(20);

uint64_t bit(int rank) { return uint64_t{1} << rank; }

Status stopped() { return Status::cancelled("the group was stopped"); }

// Rank 0's side: the only one that decides, so no two decisions can differ.
class Lead {
 public:
  Lead(Transport& transport, const WindowLayout& layout, Waiter& waiter, uint64_t completed)
      : transport_(transport),
        layout_(layout),
        waiter_(waiter),
        next_(waiter.generation() + 1),
        completed_(static_cast<size_t>(transport.size()), completed) {
    exclude(waiter.failure().suspects, waiter.failure().note);
  }

  Result<Decision> run() {
    const TimePoint began = Clock::now();
    while (true) {
      hear_reports();
      uint64_t missing = waiter_.members() & ~out_ & ~reported_;
      if (missing == 0) break;
      for (; missing != 0; missing &= missing - 1) {
        RETURN_IF_ERROR(look_at(std::countr_zero(missing), began));
      }
      if (waiter_.aborted()) return stopped();
      transport_.sleep(kNap);
    }
    return decide();
  }

 private:
  // A rank that is out stays out: a decision must not depend on what it says later. Rank 0 is never
  // out: a rank that cannot reach it ends.
  void exclude(uint64_t ranks, LossNote note) {
    ranks &= waiter_.members() & ~out_ & ~bit(0);
    out_ |= ranks;
    for (; ranks != 0; ranks &= ranks - 1) {
      note.rank = std::countr_zero(ranks);
      decision_.notes[note.rank] = note;
    }
  }

  void hear_reports() {
    uint64_t waiting = waiter_.members() & ~out_ & ~reported_ & ~bit(0);
    for (; waiting != 0; waiting &= waiting - 1) {
      const int r = std::countr_zero(waiting);
      if ((out_ & bit(r)) != 0 || transport_.poll(r, kAgreed) < next_) continue;
      Report report;
      std::memcpy(&report, transport_.window() + layout_.report(r), sizeof report);
      reported_ |= bit(r);
      completed_[static_cast<size_t>(r)] = report.completed;
      exclude(report.suspects & ~bit(r), report.note);
    }
  }

  // A member that has not reported: is there still hope?
  Status look_at(int r, TimePoint began) {
    if (r == 0) {
      reported_ |= bit(0);
      return Status::ok();
    }
    const Fault fault = waiter_.fault_of(r);
    if (fault.left) return stopped();  // it read a stop that is on its way to this rank
    LossNote note = waiter_.failure().note;
    if (note.rank != r) note = {.rank = r, .phase = Phase::kAgree};
    if (fault.ends) {
      note.cause = Cause::kGaveUp;
      exclude(bit(r), note);
      return Status::ok();
    }
    const Health health = waiter_.health(r, began);
    if (health.cause == Cause::kNone) return Status::ok();
    note.cause = health.cause;
    note.seconds = health.seconds;
    exclude(bit(r), note);
    return Status::ok();
  }

  Decision decide() {
    decision_.generation = next_;
    decision_.members = waiter_.members() & ~out_;
    decision_.completed = UINT64_MAX;
    for (uint64_t left = decision_.members; left != 0; left &= left - 1) {
      decision_.completed =
          std::min(decision_.completed, completed_[static_cast<size_t>(std::countr_zero(left))]);
    }
    // Those that are out are told too: they may only have been slow.
    for (uint64_t left = waiter_.members() & ~bit(0); left != 0; left &= left - 1) {
      const int r = std::countr_zero(left);
      transport_.put(r, layout_.decision(next_), &decision_, sizeof decision_);
      transport_.signal(r, kAgreed, next_);
    }
    return decision_;
  }

  Transport& transport_;
  const WindowLayout& layout_;
  Waiter& waiter_;
  const uint64_t next_;
  uint64_t out_ = 0;
  uint64_t reported_ = 0;
  std::vector<uint64_t> completed_;
  Decision decision_;
};

// The other ranks' side.
Result<Decision> follow(Transport& transport, const WindowLayout& layout, const Options& options,
                        Waiter& waiter, uint64_t completed) {
  const uint64_t next = waiter.generation() + 1;
  const Report report{.generation = next,
                      .completed = completed,
                      .suspects = waiter.failure().suspects,
                      .note = waiter.failure().note};
  transport.put(0, layout.report(transport.rank()), &report, sizeof report);
  transport.signal(0, kAgreed, next);
  const TimePoint began = Clock::now();
  while (transport.poll(0, kAgreed) < next) {
    if (waiter.fault_of(0).left || waiter.aborted()) return stopped();
    // Rank 0 may be busy for as long as a step may take, and then wait for others as long again.
    const Health health = waiter.health(0, began + options.step_timeout);
    if (health.cause != Cause::kNone || waiter.fault_of(0).ends) {
      return waiter.lose(bit(0),
                         {.rank = 0,
                          .phase = Phase::kAgree,
                          .cause = health.cause == Cause::kNone ? Cause::kGaveUp : health.cause,
                          .seconds = health.seconds});
    }
    transport.sleep(kNap);
  }
  return read_decision(transport, layout, next);
}

}  // namespace

Decision read_decision(Transport& transport, const WindowLayout& layout, uint64_t generation) {
  Decision decision;
  std::memcpy(&decision, transport.window() + layout.decision(generation), sizeof decision);
  return decision;
}

Result<Decision> agree(Transport& transport, const WindowLayout& layout, const Options& options,
                       Waiter& waiter, uint64_t completed) {
  Result<Decision> decision = transport.rank() == 0
                                  ? Lead(transport, layout, waiter, completed).run()
                                  : follow(transport, layout, options, waiter, completed);
  RETURN_IF_ERROR(decision.status());
  if ((decision->members & bit(transport.rank())) == 0) {
    return waiter.fence(decision->notes[transport.rank()]);
  }
  waiter.adopt(decision->generation, decision->members);
  return decision;
}

}  // namespace sortie::exchange
