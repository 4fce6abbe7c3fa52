#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "exchange/transport.h"

namespace sortie::exchange {

// Makes a rank of a `local` group misbehave. Any thread.
class FaultControl {
 public:
  virtual ~FaultControl() = default;
  virtual void kill(int rank) = 0;    // no heartbeat; what it sends vanishes; peers are not told
  virtual void end(int rank) = 0;     // the same, and peers are told at once (its socket closed)
  virtual void freeze(int rank) = 0;  // the heartbeat goes on; what it sends vanishes
  virtual void delay(int rank, Duration each_signal) = 0;  // merely slow
  // Like SIGSTOP and SIGCONT: no heartbeat, and what it sends waits and arrives after resume().
  virtual void pause(int rank) = 0;
  virtual void resume(int rank) = 0;
  // Ranks on different islands neither reach nor see each other. All begin on island 0.
  virtual void move(int rank, int island) = 0;
};

struct LocalGroup {
  std::vector<std::shared_ptr<Transport>> transports;  // one a rank
  std::shared_ptr<FaultControl> faults;
};

// N ranks as threads of one process: windows are plain memory, signals are atomics. The group lives
// until its last handle is gone.
LocalGroup make_local_group_with_faults(int ranks, int64_t window_bytes);
std::vector<std::shared_ptr<Transport>> make_local_group(int ranks, int64_t window_bytes);

}  // namespace sortie::exchange
