#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "exchange/exchange.h"
#include "exchange/window.h"

namespace sortie::exchange {

// Where a rank stands, for the sentence that names a lost peer. Travels in the fault word.
enum class Phase : uint8_t { kDispatch, kCombine, kHeader, kIdle, kSettle, kAgree };

struct Place {
  int layer = 0;
  Phase phase = Phase::kHeader;
};

// Why a rank counts as lost. kHearsay: a peer says so.
enum class Cause : uint8_t { kNone, kEnded, kSilent, kStuck, kGaveUp, kHearsay };

// A loss as the ranks tell it to each other.
struct LossNote {
  int32_t rank = -1;
  int32_t layer = 0;
  Phase phase = Phase::kHeader;
  Cause cause = Cause::kNone;
  float seconds = 0;  // of silence or standstill
};
// "rank 1 was lost in layer 4, dispatch: no sign of life for 10.0 s"
std::string sentence(const LossNote& note);

// What a peer has said in its fault word, about this generation.
struct Fault {
  bool told = false;
  bool left = false;  // a stop that all ranks know of, or will
  bool ends = false;  // it takes no further part
  int lost = -1;      // because of this rank; -1: for a reason of its own
  Place place;
  bool died = false;  // the lost rank's process has ended
};

struct Health {
  Cause cause = Cause::kNone;
  float seconds = 0;
};

// Waits for signals of the other members, and knows when to give up. The first failure is told to
// the others through their fault words, and every later call returns it at once, so that the rest
// of a step takes no further time. It is final, unless the ranks agree on a membership without the
// lost one (agreement.h).
class Waiter {
 public:
  struct Failure {
    Status status;
    uint64_t suspects = 0;  // ranks that this one missed itself
    LossNote note;
    bool may_go_on = false;  // with kDegrade, without the suspects
  };

  Waiter(std::shared_ptr<Transport> transport, const WindowLayout& layout, const Options& options);

  // Until every member has signalled at least `epoch` under `index`.
  Status wait_all(int index, uint64_t epoch, Place place);
  // Until one member has (true), the bell was rung by wake(), or `most` has passed.
  Result<bool> wait_any(int index, uint64_t epoch, Duration most);

  void wake();   // any thread
  void abort();  // any thread
  bool aborted() const { return aborted_; }

  uint64_t members() const { return members_; }
  bool is_member(int rank) const { return (members_ >> rank & 1) != 0; }
  uint64_t generation() const { return generation_; }  // of the membership
  const Failure& failure() const { return failure_; }
  // The failure that ended the step, if one has. To be asked at the start of a phase.
  Status ready(Place place);

  // Ends the exchange for a reason of this rank's own, and tells the members.
  Status fail(Status own, Place place);
  // Ends it because of lost ranks: `note` names one of them.
  Status lose(uint64_t suspects, LossNote note);
  // Ends it because the others go on without this rank.
  Status fence(const LossNote& note);
  // This rank leaves after a stop; the members need not wait for it.
  void leave();
  // Goes on with these members.
  void adopt(uint64_t generation, uint64_t members);

  Fault fault_of(int peer) const;
  // Whether there is still hope for a peer that has been waited for since `began`.
  Health health(int peer, TimePoint began);

 private:
  bool arrived(int peer, int index, uint64_t epoch);
  uint64_t others() const { return members_ & ~(uint64_t{1} << rank_); }
  // Looks for reports of others, deaths and missed deadlines among the peers of `pending`.
  Status check_peers(uint64_t pending, TimePoint began, int index, uint64_t epoch, Place place);
  Status check_reports();
  Status check_self(Place place);
  Status end(Failure failure, uint64_t word);
  bool silent(int peer, Duration& silence);
  const char* advice(int lost) const;

  const std::shared_ptr<Transport> transport_;
  const WindowLayout layout_;
  const Options options_;
  const int rank_;
  const int size_;
  std::atomic<bool> aborted_{false};
  std::atomic<bool> woken_{false};
  int spin_rest_ = 0;
  uint64_t generation_ = 0;
  uint64_t members_;
  Failure failure_;
};

}  // namespace sortie::exchange
