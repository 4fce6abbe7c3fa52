#pragma once

#include <cstdint>

#include "exchange/exchange.h"
#include "exchange/waiter.h"
#include "exchange/window.h"

namespace sortie::exchange {

// What a rank tells rank 0 after a step has failed on it.
struct Report {
  uint64_t generation = 0;  // the one to agree on
  uint64_t completed = 0;   // header epoch of the last step that this rank has finished
  uint64_t suspects = 0;    // ranks that it missed itself
  LossNote note;            // where and why
};

// What rank 0 makes of the reports, the same for all that it is sent to.
struct Decision {
  uint64_t generation = 0;
  uint64_t members = 0;
  uint64_t completed = 0;     // the last step that every member has finished
  LossNote notes[kMaxRanks];  // by rank, for those that are out since the generation before
};

// Agrees with the survivors on who is left after the waiter's failure, and lets the waiter go on
// with them (docs/exchange.md, "Going on without a rank"). An error: this rank cannot go on.
Result<Decision> agree(Transport& transport, const WindowLayout& layout, const Options& options,
                       Waiter& waiter, uint64_t completed);

// The decision of `generation` that lies in this rank's window.
Decision read_decision(Transport& transport, const WindowLayout& layout, uint64_t generation);

}  // namespace sortie::exchange
