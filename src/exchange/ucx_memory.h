#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "exchange/frames.h"
#include "exchange/ucx_api.h"

namespace sortie::exchange {

// One rank's lanes to ranks of its host: a window of shared memory that UCX allocates, and the
// peers' windows mapped, so that a put is a copy and a signal a store. Holds the UCX objects, in
// the order in which they must go away.
class UcxMemory {
 public:
  UcxMemory() = default;
  UcxMemory(const UcxMemory&) = delete;
  UcxMemory& operator=(const UcxMemory&) = delete;
  ~UcxMemory();

  // Allocates the window over one kind of shared memory (a UCX transport: sysv, posix).
  Status open(const std::string& memory, int64_t bytes);
  std::byte* base() const { return base_; }
  // What a peer's map() takes. Travels over Control only.
  Result<Bytes> offer() const;
  // Maps the window of a peer; nullptr where UCX has no way to.
  std::byte* map(std::span<const std::byte> offer, std::string& lane);

 private:
  std::string reason(const std::string& what, ucs_status_t status) const;

  struct Peer {
    ucp_ep_h endpoint = nullptr;
    ucp_rkey_h key = nullptr;
  };

  const UcxApi* api_ = nullptr;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  ucp_mem_h memory_ = nullptr;
  std::byte* base_ = nullptr;
  std::vector<Peer> peers_;
};

}  // namespace sortie::exchange
