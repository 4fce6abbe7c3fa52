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
};

// The transport between processes of one host, over UCX. Collective: every rank of `control` calls
// it with the same window. Windows are shared memory that UCX allocates and maps (ucp_mem_map,
// ucp_rkey_ptr), so a put is a copy and a signal a store; signs of life come from `control`.
// Errors are sentences and the same on all ranks: no shared memory left, a rank that never came.
Result<std::shared_ptr<Transport>> make_ucx_transport(std::shared_ptr<Control> control,
                                                      const UcxOptions& options);

}  // namespace sortie::exchange
