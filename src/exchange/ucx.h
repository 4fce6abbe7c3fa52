#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "exchange/control.h"
#include "exchange/transport.h"

namespace sortie::exchange {

struct UcxOptions {
  int64_t window_bytes = 0;
  Duration dist_timeout = seconds(60);
  // UCX transports to try, in this order; the first that works on every rank is taken. Both are
  // shared memory: ranks of one host never open a port. SysV first, because its segments have no
  // name that a killed process could leave behind.
  std::vector<std::string> memories = {"sysv", "posix"};
  // This host's address in the network of the other hosts (ProcessGroup::address).
  std::string network_address;
  // Tests and benchmarks: reach the ranks of this host over the network too.
  bool force_network = false;
};

// The transport between processes, over UCX. Collective: every rank of `control` calls it with the
// same window. Ranks of one host share memory (ucx_memory.h) and open no port; ranks of different
// hosts send active messages over TCP or RDMA (ucx_network.h). Signs of life come from `control`.
// Errors are sentences and the same on all ranks: no shared memory left, a rank that never came, a
// network that lets nothing through.
Result<std::shared_ptr<Transport>> make_ucx_transport(std::shared_ptr<Control> control,
                                                      const UcxOptions& options);

}  // namespace sortie::exchange
