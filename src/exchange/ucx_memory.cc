#include "exchange/ucx_memory.h"

#include <fmt/format.h>
#include <sys/statvfs.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "exchange/ucx_lane.h"

namespace sortie::exchange {
namespace {

// Room that UCX itself takes in shared memory beside the window (its receive queue).
constexpr int64_t kUcxShare = 8 << 20;

// In one blob: this, the worker's address, the key.
struct Offer {
  uint64_t base = 0;
  uint64_t address_bytes = 0;
};

// Refuses what would not fit before UCX fills the file system to find out.
Status check_dev_shm(int64_t bytes) {
  struct statvfs fs = {};
  if (statvfs("/dev/shm", &fs) != 0) {
    return Status::exhausted(fmt::format("/dev/shm cannot be used: {}", strerror(errno)));
  }
  const auto free = static_cast<int64_t>(fs.f_bavail) * static_cast<int64_t>(fs.f_frsize);
  if (bytes + kUcxShare <= free) return Status::ok();
  return Status::exhausted(fmt::format(
      "/dev/shm has {} MiB left and a rank needs {} MiB; enlarge it (mount -o remount,size=...; "
      "docker --shm-size) or lower --max-dispatch-tokens and --chunked-prefill-size",
      free >> 20, (bytes + kUcxShare) >> 20));
}

}  // namespace

std::string UcxMemory::reason(const std::string& what, ucs_status_t status) const {
  return fmt::format("{}: {}", what, api_->status_string(status));
}

Status UcxMemory::open(const std::string& memory, int64_t bytes) {
  if (memory == "posix") RETURN_IF_ERROR(check_dev_shm(bytes));
  ASSIGN_OR_RETURN(api_, load_ucx());
  ucp_config_t* config = nullptr;
  ucs_status_t status = api_->config_read("SORTIE", nullptr, &config);  // never the user's UCX_*
  if (status != UCS_OK) return Status::internal(reason("UCX configuration", status));
  // PEER mode lets an endpoint be closed while its peer is gone; shared memory offers it only with
  // MM_ERROR_HANDLING, and where that is missing UCX would look for TCP, which TLS forbids.
  const std::string transports = memory + ",self";
  // Otherwise UCX falls back to the heap, which no peer can map.
  const std::string allocate = "md:" + memory;
  const std::pair<const char*, const char*> settings[] = {{"TLS", transports.c_str()},
                                                          {"ALLOC_PRIO", allocate.c_str()},
                                                          {"MM_ERROR_HANDLING", "y"},
                                                          {"KEEPALIVE_INTERVAL", "1s"}};
  for (const auto& [name, value] : settings) {
    if (status == UCS_OK) status = api_->config_modify(config, name, value);
  }
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_RMA;
  if (status == UCS_OK)
    status = api_->init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &context_);
  api_->config_release(config);
  if (status != UCS_OK) return Status::exhausted(reason("UCX over " + memory, status));

  ucp_worker_params_t worker_params{};
  worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker_params.thread_mode = UCS_THREAD_MODE_SINGLE;
  status = api_->worker_create(context_, &worker_params, &worker_);
  if (status != UCS_OK) return Status::exhausted(reason("UCX worker over " + memory, status));

  ucp_mem_map_params_t map_params{};
  map_params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                          UCP_MEM_MAP_PARAM_FIELD_FLAGS;
  map_params.length = static_cast<size_t>(bytes);
  map_params.flags = UCP_MEM_MAP_ALLOCATE;
  status = api_->mem_map(context_, &map_params, &memory_);
  if (status != UCS_OK) {
    return Status::exhausted(
        fmt::format("no {} MiB of {} shared memory for the exchange ({}); see `ipcs -l`, or lower "
                    "--max-dispatch-tokens and --chunked-prefill-size",
                    bytes >> 20, memory, api_->status_string(status)));
  }
  ucp_mem_attr_t attributes{};
  attributes.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS;
  status = api_->mem_query(memory_, &attributes);
  if (status != UCS_OK) return Status::internal(reason("UCX window", status));
  base_ = static_cast<std::byte*>(attributes.address);
  return Status::ok();
}

Result<Bytes> UcxMemory::offer() const {
  ucp_address_t* address = nullptr;
  size_t address_bytes = 0;
  ucs_status_t status = api_->worker_get_address(worker_, &address, &address_bytes);
  if (status != UCS_OK) return Status::internal(reason("UCX address", status));
  void* key = nullptr;
  size_t key_bytes = 0;
  status = api_->rkey_pack(context_, memory_, &key, &key_bytes);
  if (status != UCS_OK) {
    api_->worker_release_address(worker_, address);
    return Status::internal(reason("UCX key", status));
  }
  const Offer head{.base = reinterpret_cast<uint64_t>(base_), .address_bytes = address_bytes};
  Bytes blob(sizeof head + address_bytes + key_bytes);
  std::memcpy(blob.data(), &head, sizeof head);
  std::memcpy(blob.data() + sizeof head, address, address_bytes);
  std::memcpy(blob.data() + sizeof head + address_bytes, key, key_bytes);
  api_->rkey_buffer_release(key);
  api_->worker_release_address(worker_, address);
  return blob;
}

std::byte* UcxMemory::map(std::span<const std::byte> offer, std::string& lane) {
  Offer head;
  if (offer.size() < sizeof head) return nullptr;
  std::memcpy(&head, offer.data(), sizeof head);
  if (offer.size() - sizeof head < head.address_bytes) return nullptr;
  const std::byte* address = offer.data() + sizeof head;
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(address);
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = [](void*, ucp_ep_h, ucs_status_t) {};  // control sees deaths
  Peer& peer = peers_.emplace_back();
  if (api_->ep_create(worker_, &params, &peer.endpoint) != UCS_OK) return nullptr;
  lane = first_lane(*api_, peer.endpoint);
  if (api_->ep_rkey_unpack(peer.endpoint, address + head.address_bytes, &peer.key) != UCS_OK) {
    return nullptr;
  }
  void* base = nullptr;
  if (api_->rkey_ptr(peer.key, head.base, &base) != UCS_OK) return nullptr;
  return static_cast<std::byte*>(base);
}

UcxMemory::~UcxMemory() {
  for (const Peer& peer : peers_) {
    if (peer.key != nullptr) api_->rkey_destroy(peer.key);
  }
  for (const Peer& peer : peers_) {
    if (peer.endpoint == nullptr) continue;
    ucp_request_param_t force{};
    force.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    force.flags = UCP_EP_CLOSE_FLAG_FORCE;
    void* request = api_->ep_close_nbx(peer.endpoint, &force);
    if (!UCS_PTR_IS_PTR(request)) continue;
    const Deadline deadline(seconds(1));
    while (api_->request_check_status(request) == UCS_INPROGRESS && !deadline.passed()) {
      api_->worker_progress(worker_);
    }
    api_->request_free(request);
  }
  if (memory_ != nullptr) api_->mem_unmap(context_, memory_);
  if (worker_ != nullptr) api_->worker_destroy(worker_);
  if (context_ != nullptr) api_->cleanup(context_);
}

}  // namespace sortie::exchange
