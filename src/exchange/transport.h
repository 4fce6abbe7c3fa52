#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/clock.h"
#include "base/status.h"

namespace sortie::exchange {

// The signal words that a rank keeps for each of its peers.
enum Signal : int { kDispatched, kCombined, kHeader, kSettled, kFault, kAgreed, kSignals };

// What an exchange needs of the wire between the ranks of a group: one-sided writes into a peer's
// window, signals that arrive after them, and signs of life. `local` (threads of a process) and
// `ucx` (processes) implement it; exchange.cc builds dispatch and combine on top, once.
//
// Every rank owns a window of the same size, made at start, and kSignals x ranks signal words. A
// signal carries an epoch: it only grows, nothing is ever cleared. put, signal, poll and sleep
// belong to the one thread that runs the rank's steps; the rest may be called from any thread.
class Transport {
 public:
  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::byte* window() = 0;  // this rank's own window, 64-byte aligned
  virtual int64_t window_bytes() const = 0;

  // Copies bytes into `peer`'s window at `offset`. The source may be reused on return. A dead peer
  // is not an error here: the wait that follows names it.
  virtual void put(int peer, int64_t offset, const void* data, int64_t bytes) = 0;
  // Sets signal word `index` of this rank at `peer` to `epoch`, after all earlier puts to that peer
  // are visible there, and wakes the peer if it sleeps.
  virtual void signal(int peer, int index, uint64_t epoch) = 0;
  // The newest epoch that `peer` has signalled here under `index`; acquire: the puts before it can
  // be read. Makes progress on the transport.
  virtual uint64_t poll(int peer, int index) = 0;
  // Gives the processor away until something may have arrived since the last sleep or `most` has
  // passed.
  virtual void sleep(Duration most) = 0;
  // Ends the sleep of `peer`, which may be this rank itself.
  virtual void wake(int peer) = 0;

  // When `peer` last showed life (heartbeat, kept by a thread that is not the step's), and whether
  // it is known to be dead (its process or its socket is gone).
  virtual TimePoint last_life(int peer) const = 0;
  virtual bool dead(int peer) const = 0;
  // The lane in use for a peer, for the start-up log ("local", "posix/memory", "tcp").
  virtual std::string lane(int peer) const = 0;
};

}  // namespace sortie::exchange
