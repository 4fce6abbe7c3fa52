#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "exchange/exchange.h"

namespace sortie::exchange {

// Where a rank stands, for the sentence that names a lost peer. Travels in the fault word.
enum class Phase : uint8_t { kDispatch, kCombine, kHeader, kIdle };

struct Place {
  int layer = 0;
  Phase phase = Phase::kHeader;
};

// Waits for signals of the peers, and knows when to give up. The first failure is final: it masks
// the lost peer, is told to the others through their fault words, and every later call returns it
// at once, so that the rest of a step takes no further time.
class Waiter {
 public:
  Waiter(std::shared_ptr<Transport> transport, const Options& options);

  // Until every peer has signalled at least `epoch` under `index`.
  Status wait_all(int index, uint64_t epoch, Place place);
  // Until one peer has (true), the bell was rung by wake(), or `most` has passed.
  Result<bool> wait_any(int index, uint64_t epoch, Duration most);

  void wake();   // any thread
  void abort();  // any thread
  // The failure that ended the exchange, if one has. To be asked at the start of a phase.
  Status ready(Place place);
  // Makes `failure` final and tells the peers that this rank gives up, and because of whom (-1: its
  // own failure).
  Status fail(Status failure, int lost, Place place, bool died);

 private:
  bool arrived(int peer, int index, uint64_t epoch);
  // Looks for reports of others, deaths and missed deadlines among the peers of `pending`.
  Status check_peers(uint64_t pending, TimePoint began, int index, uint64_t epoch, Place place);
  Status check_reports(Place place);
  bool silent(int peer, Duration& silence);

  const std::shared_ptr<Transport> transport_;
  const Options options_;
  const int rank_;
  const int size_;
  std::atomic<bool> aborted_{false};
  std::atomic<bool> woken_{false};
  int spin_rest_ = 0;
  Status failure_;
};

}  // namespace sortie::exchange
