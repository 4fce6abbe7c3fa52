#include "exchange/ucx.h"

#include <fmt/format.h>
#include <sys/statvfs.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/log.h"
#include "exchange/shared_window.h"
#include "exchange/ucx_api.h"

namespace sortie::exchange {
namespace {

// Room that UCX itself takes in shared memory beside the window (its receive queue).
constexpr int64_t kUcxShare = 8 << 20;

// What a rank tells the others about its window. In one blob: this, the worker's address, the key.
struct Offer {
  uint8_t good = 0;
  uint64_t base = 0;
  uint32_t address_bytes = 0;
  uint32_t key_bytes = 0;  // in place of the key stands the error if not good
};

// One rank's UCX objects, in the order in which they must go away.
class Ucx {
 public:
  Ucx() = default;
  Ucx(const Ucx&) = delete;
  Ucx& operator=(const Ucx&) = delete;
  ~Ucx();

  // Allocates the window over one kind of shared memory.
  Status open(const std::string& memory, int64_t bytes);
  Bytes offer() const;
  // Maps the window of a peer; nullptr where UCX has no way to.
  std::byte* map(const Offer& offer, const std::byte* address, const std::byte* key,
                 std::string& lane);
  std::byte* base() const { return base_; }

 private:
  std::string reason(const std::string& what, ucs_status_t status) const {
    return fmt::format("{}: {}", what, api_->status_string(status));
  }

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

Status Ucx::open(const std::string& memory, int64_t bytes) {
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

Bytes failed_offer(const std::string& why) {
  const Offer head{.key_bytes = static_cast<uint32_t>(why.size())};
  Bytes blob(sizeof head + why.size());
  std::memcpy(blob.data(), &head, sizeof head);
  std::memcpy(blob.data() + sizeof head, why.data(), why.size());
  return blob;
}

Bytes Ucx::offer() const {
  ucp_address_t* address = nullptr;
  size_t address_bytes = 0;
  ucs_status_t status = api_->worker_get_address(worker_, &address, &address_bytes);
  if (status != UCS_OK) return failed_offer(reason("UCX address", status));
  void* key = nullptr;
  size_t key_bytes = 0;
  status = api_->rkey_pack(context_, memory_, &key, &key_bytes);
  if (status != UCS_OK) {
    api_->worker_release_address(worker_, address);
    return failed_offer(reason("UCX key", status));
  }
  const Offer head{.good = 1,
                   .base = reinterpret_cast<uint64_t>(base_),
                   .address_bytes = static_cast<uint32_t>(address_bytes),
                   .key_bytes = static_cast<uint32_t>(key_bytes)};
  Bytes blob(sizeof head + address_bytes + key_bytes);
  std::memcpy(blob.data(), &head, sizeof head);
  std::memcpy(blob.data() + sizeof head, address, address_bytes);
  std::memcpy(blob.data() + sizeof head + address_bytes, key, key_bytes);
  api_->rkey_buffer_release(key);
  api_->worker_release_address(worker_, address);
  return blob;
}

// "lane[0]:  1:sysv/memory.0 md[1] ..." names the transport and device of the first lane.
std::string first_lane(const UcxApi& api, ucp_ep_h endpoint) {
  char* text = nullptr;
  size_t size = 0;
  FILE* out = open_memstream(&text, &size);
  if (out == nullptr) return "unknown";
  api.ep_print_info(endpoint, out);
  std::fclose(out);
  std::string info(text, size);
  std::free(text);  // NOLINT(cppcoreguidelines-no-malloc): open_memstream's
  const size_t lane = info.find("lane[0]:");
  const size_t begin = lane == std::string::npos ? lane : info.find(':', lane + 8);
  if (begin == std::string::npos) return "unknown";
  return info.substr(begin + 1, info.find_first_of(". \n", begin) - begin - 1);
}

std::byte* Ucx::map(const Offer& offer, const std::byte* address, const std::byte* key,
                    std::string& lane) {
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(address);
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = [](void*, ucp_ep_h, ucs_status_t) {};  // control sees deaths
  Peer& peer = peers_.emplace_back();
  if (api_->ep_create(worker_, &params, &peer.endpoint) != UCS_OK) return nullptr;
  lane = first_lane(*api_, peer.endpoint);
  if (api_->ep_rkey_unpack(peer.endpoint, key, &peer.key) != UCS_OK) return nullptr;
  void* base = nullptr;
  if (api_->rkey_ptr(peer.key, offer.base, &base) != UCS_OK) return nullptr;
  return static_cast<std::byte*>(base);
}

Ucx::~Ucx() {
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

class UcxTransport final : public Transport {
 public:
  UcxTransport(std::shared_ptr<Control> control, int64_t window_bytes)
      : control_(std::move(control)),
        window_bytes_(window_bytes),
        shared_(static_cast<size_t>(control_->size())),
        lanes_(static_cast<size_t>(control_->size()), "self") {}

  // Tries one kind of memory on all ranks. Sets `works` where every rank has all others mapped.
  Status open(const std::string& memory, const UcxOptions& options, bool& works, Status& why_not);

  int rank() const override { return control_->rank(); }
  int size() const override { return control_->size(); }
  std::byte* window() override { return own().window(); }
  int64_t window_bytes() const override { return window_bytes_; }

  void put(int peer, int64_t offset, const void* data, int64_t bytes) override {
    at(peer).put(offset, data, bytes);
  }
  void signal(int peer, int index, uint64_t epoch) override {
    at(peer).signal(index, rank(), epoch);
  }
  uint64_t poll(int peer, int index) override { return own().poll(index, peer); }
  void sleep(Duration most) override { own().bell().sleep(seen_, most); }
  void wake(int peer) override { at(peer).bell().ring(); }

  TimePoint last_life(int peer) const override { return control_->last_life(peer); }
  bool dead(int peer) const override { return control_->dead(peer); }
  std::string lane(int peer) const override { return lanes_[static_cast<size_t>(peer)]; }

 private:
  SharedWindow& at(int peer) { return shared_[static_cast<size_t>(peer)]; }
  SharedWindow& own() { return at(rank()); }
  Status connect(const std::vector<Bytes>& offers);

  const std::shared_ptr<Control> control_;
  const int64_t window_bytes_;
  std::unique_ptr<Ucx> ucx_;
  std::vector<SharedWindow> shared_;  // by rank
  std::vector<std::string> lanes_;
  uint32_t seen_ = 0;
};

// The first rank that reports a failure, in its words.
Result<Offer> read_offer(int rank, const Bytes& blob) {
  Offer head;
  if (blob.size() < sizeof head) return Status::internal(fmt::format("rank {}: no offer", rank));
  std::memcpy(&head, blob.data(), sizeof head);
  if (blob.size() - sizeof head != size_t{head.address_bytes} + head.key_bytes) {
    return Status::internal(fmt::format("rank {}: malformed offer", rank));
  }
  if (head.good != 0) return head;
  return Status::exhausted(fmt::format(
      "rank {}: {}", rank,
      std::string_view(reinterpret_cast<const char*>(blob.data()) + sizeof head, head.key_bytes)));
}

Status UcxTransport::connect(const std::vector<Bytes>& offers) {
  for (int peer = 0; peer < size(); ++peer) {
    const Bytes& blob = offers[static_cast<size_t>(peer)];
    ASSIGN_OR_RETURN(const Offer offer, read_offer(peer, blob));
    if (peer == rank()) continue;
    const std::byte* address = blob.data() + sizeof offer;
    std::string& lane = lanes_[static_cast<size_t>(peer)];
    std::byte* base = ucx_->map(offer, address, address + offer.address_bytes, lane);
    if (base == nullptr) {
      return Status::internal(fmt::format("the window of rank {} cannot be mapped", peer));
    }
    at(peer) = SharedWindow(base, window_bytes_, size());
  }
  return Status::ok();
}

Status UcxTransport::open(const std::string& memory, const UcxOptions& options, bool& works,
                          Status& why_not) {
  ucx_ = std::make_unique<Ucx>();
  const Status opened = ucx_->open(memory, SharedWindow::bytes(window_bytes_, size()));
  if (opened) {
    own() = SharedWindow(ucx_->base(), window_bytes_, size());
    own().start();
  }
  ASSIGN_OR_RETURN(const std::vector<Bytes> offers,
                   control_->all_gather(opened ? ucx_->offer() : failed_offer(opened.message()),
                                        options.dist_timeout));
  const Status connected = connect(offers);

  // The second round is a barrier too: nobody sends before everybody is mapped.
  const Bytes verdict = connected ? Bytes() : failed_offer(connected.message());
  ASSIGN_OR_RETURN(const std::vector<Bytes> verdicts,
                   control_->all_gather(verdict, options.dist_timeout));
  works = true;
  for (int r = size() - 1; r >= 0; --r) {
    const Bytes& blob = verdicts[static_cast<size_t>(r)];
    if (blob.empty()) continue;
    works = false;
    why_not = read_offer(r, blob).status();
  }
  // An offer's own sentence names its rank already.
  if (!works && !connected) why_not = connected;
  return Status::ok();
}

}  // namespace

Result<std::shared_ptr<Transport>> make_ucx_transport(std::shared_ptr<Control> control,
                                                      const UcxOptions& options) {
  auto transport = std::make_shared<UcxTransport>(std::move(control), options.window_bytes);
  Status why_not;
  for (const std::string& memory : options.memories) {
    bool works = false;
    RETURN_IF_ERROR(transport->open(memory, options, works, why_not));
    if (!works) continue;
    for (int peer = 0; peer < transport->size(); ++peer) {
      if (peer == transport->rank()) continue;
      spdlog::info("exchange: rank {} to rank {} over {}", transport->rank(), peer,
                   transport->lane(peer));
    }
    return std::shared_ptr<Transport>(std::move(transport));
  }
  return why_not;
}

}  // namespace sortie::exchange
