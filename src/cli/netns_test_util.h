// Two hosts made of this one, for tests: network namespaces joined by a line that loses and delays
// packets or is cut.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "base/clock.h"
#include "base/status.h"

namespace sortie::cli {

// A host: a process that keeps a network, an IPC, a UTS and a mount namespace alive, with a TUN
// device for a network card. Ranks in different IPC namespaces cannot share SysV memory, so only
// the line is left to them.
class NamespaceHost {
 public:
  // `number` 0 or 1: the host's address is 10.77.0.1 or 10.77.0.2.
  static Result<std::unique_ptr<NamespaceHost>> make(int number);
  ~NamespaceHost();
  NamespaceHost(const NamespaceHost&) = delete;
  NamespaceHost& operator=(const NamespaceHost&) = delete;

  // Moves the calling process (a child between fork and exec) into the host; false if refused.
  bool enter() const;
  int tun() const { return tun_; }
  // Lines of the host's /proc/net/tcp and tcp6 whose sockets belong to a process.
  int sockets() const;
  // SysV segments of the host.
  int segments() const;

 private:
  NamespaceHost() = default;
  int read_count(char what) const;

  pid_t keeper_ = -1;
  int socket_ = -1;  // to the keeper
  int tun_ = -1;     // packets of the host's device
  std::array<int, 4> namespaces_ = {-1, -1, -1, -1};
};

struct LineQuality {
  double loss = 0;                    // of packets, each way
  Duration delay = Duration::zero();  // each way
};

// Forwards packets between two hosts on a thread of its own.
class Line {
 public:
  Line(const NamespaceHost& a, const NamespaceHost& b, LineQuality quality);
  ~Line();
  Line(const Line&) = delete;
  Line& operator=(const Line&) = delete;

  void cut(bool now) { cut_ = now; }
  int64_t forwarded() const { return forwarded_; }
  int64_t lost() const { return lost_; }

 private:
  void loop();

  const std::array<int, 2> tun_;
  const LineQuality quality_;
  int bell_;
  std::atomic<bool> stop_{false};
  std::atomic<bool> cut_{false};
  std::atomic<int64_t> forwarded_{0};
  std::atomic<int64_t> lost_{0};
  std::thread thread_;
};

}  // namespace sortie::cli
