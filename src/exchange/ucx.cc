#include "exchange/ucx.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/host.h"
#include "base/log.h"
#include "exchange/shared_window.h"
#include "exchange/ucx_memory.h"
#include "exchange/ucx_network.h"

namespace sortie::exchange {
namespace {

// What must be the same for two ranks to share memory: the running system, and the namespaces of
// its SysV and POSIX segments.
std::string host_identity() {
  struct stat ipc = {};
  struct stat shm = {};
  (void)stat("/proc/self/ns/ipc", &ipc);
  (void)stat("/dev/shm", &shm);
  return fmt::format("{} {} {}", boot_id(), ipc.st_ino, shm.st_dev);
}

Bytes bytes_of(const std::string& text) {
  const auto bytes = std::as_bytes(std::span<const char>(text));
  return {bytes.begin(), bytes.end()};
}
std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

class UcxTransport final : public Transport {
 public:
  UcxTransport(std::shared_ptr<Control> control, const UcxOptions& options)
      : control_(std::move(control)),
        options_(options),
        shared_(static_cast<size_t>(control_->size())),
        far_(static_cast<size_t>(control_->size())),
        lanes_(static_cast<size_t>(control_->size()), "self") {}
  ~UcxTransport() override { control_->on_beat(nullptr); }
  UcxTransport(const UcxTransport&) = delete;
  UcxTransport& operator=(const UcxTransport&) = delete;

  Status open();

  int rank() const override { return control_->rank(); }
  int size() const override { return control_->size(); }
  std::byte* window() override { return own().window(); }
  int64_t window_bytes() const override { return options_.window_bytes; }

  void put(int peer, int64_t offset, const void* data, int64_t bytes) override {
    if (is_far(peer)) return network_->put(peer, offset, data, bytes);
    at(peer).put(offset, data, bytes);
  }
  void signal(int peer, int index, uint64_t epoch) override {
    if (is_far(peer)) return network_->signal(peer, index, epoch);
    at(peer).signal(index, rank(), epoch);
  }
  uint64_t poll(int peer, int index) override { return own().poll(index, peer); }
  void sleep(Duration most) override { own().bell().sleep(seen_, most); }
  void wake(int peer) override {
    if (is_far(peer)) return network_->signal(peer, -1, 0);
    at(peer).bell().ring();
  }

  // Ranks of this host show their life in the window too: it does not depend on rank 0, which may
  // be beyond a network that has failed.
  TimePoint last_life(int peer) const override {
    const TimePoint told = control_->last_life(peer);
    return is_far(peer) ? told : std::max(told, shared_[static_cast<size_t>(peer)].life());
  }
  bool dead(int peer) const override { return control_->dead(peer); }
  std::string lane(int peer) const override { return lanes_[static_cast<size_t>(peer)]; }

 private:
  SharedWindow& at(int peer) { return shared_[static_cast<size_t>(peer)]; }
  SharedWindow& own() { return at(rank()); }
  bool is_far(int peer) const { return far_[static_cast<size_t>(peer)] != 0; }

  Status find_hosts();
  Status offer_all(const Result<Bytes>& mine, std::vector<Bytes>& offers);
  Status agree(const Status& mine, bool& works, Status& why_not);
  Status open_memory(const std::string& memory, bool& works, Status& why_not);
  Status open_network();
  Status connect_network(const std::vector<Bytes>& offers);

  const std::shared_ptr<Control> control_;
  const UcxOptions options_;
  std::unique_ptr<UcxMemory> memory_;
  std::vector<SharedWindow> shared_;  // by rank: this one's and those of its host
  std::vector<uint8_t> far_;          // by rank: reached over the network
  bool any_far_ = false;              // of any rank to any other: the same on all
  std::vector<std::string> lanes_;
  uint32_t seen_ = 0;
  std::unique_ptr<UcxNetwork> network_;  // last: its thread writes to the window
};

// An offer travels as one byte, whether it is one, and the offer or the reason why there is none.
Bytes packed(const Result<Bytes>& offer) {
  Bytes blob(1, std::byte{offer.is_ok()});
  const Bytes tail = offer ? *offer : bytes_of(offer.status().message());
  blob.insert(blob.end(), tail.begin(), tail.end());
  return blob;
}

// Every rank's offer, or the first refusal in its rank's words. Collective.
Status UcxTransport::offer_all(const Result<Bytes>& mine, std::vector<Bytes>& offers) {
  ASSIGN_OR_RETURN(offers, control_->all_gather(packed(mine), options_.dist_timeout));
  return Status::ok();
}

Result<std::span<const std::byte>> offer_of(int rank, const Bytes& blob) {
  if (blob.empty()) return Status::internal(fmt::format("rank {}: no offer", rank));
  const auto tail = std::span(blob).subspan(1);
  if (blob[0] != std::byte{0}) return tail;
  return Status::exhausted(fmt::format("rank {}: {}", rank, text_of(tail)));
}

// Whether all ranks are content; a barrier too. Collective: an error is one of Control.
Status UcxTransport::agree(const Status& mine, bool& works, Status& why_not) {
  const Bytes verdict = mine ? Bytes() : bytes_of(mine.message());
  ASSIGN_OR_RETURN(const std::vector<Bytes> verdicts,
                   control_->all_gather(verdict, options_.dist_timeout));
  works = true;
  for (int r = size() - 1; r >= 0; --r) {
    const Bytes& blob = verdicts[static_cast<size_t>(r)];
    if (blob.empty()) continue;
    works = false;
    why_not = Status::exhausted(fmt::format("rank {}: {}", r, text_of(blob)));
  }
  // An offer's own sentence names its rank already.
  if (!works && !mine) why_not = mine;
  return Status::ok();
}

Status UcxTransport::find_hosts() {
  const std::string mine = options_.force_network ? std::to_string(rank()) : host_identity();
  ASSIGN_OR_RETURN(const std::vector<Bytes> all,
                   control_->all_gather(bytes_of(mine), options_.dist_timeout));
  for (int peer = 0; peer < size(); ++peer) {
    const auto host = text_of(all[static_cast<size_t>(peer)]);
    far_[static_cast<size_t>(peer)] = host != mine ? 1 : 0;
    any_far_ = any_far_ || host != text_of(all[0]);
  }
  return Status::ok();
}

// Tries one kind of memory on all ranks. Sets `works` where every rank has its host's others
// mapped.
Status UcxTransport::open_memory(const std::string& memory, bool& works, Status& why_not) {
  memory_ = std::make_unique<UcxMemory>();
  Status status = memory_->open(memory, SharedWindow::bytes(options_.window_bytes, size()));
  if (status) {
    own() = SharedWindow(memory_->base(), options_.window_bytes, size());
    own().start();
  }
  std::vector<Bytes> offers;
  RETURN_IF_ERROR(offer_all(status ? memory_->offer() : Result<Bytes>(status), offers));
  status = Status::ok();
  for (int peer = 0; peer < size() && status; ++peer) {
    const auto offer = offer_of(peer, offers[static_cast<size_t>(peer)]);
    status = offer.status();
    if (!status || peer == rank() || is_far(peer)) continue;
    std::byte* base = memory_->map(*offer, lanes_[static_cast<size_t>(peer)]);
    if (base == nullptr) {
      status = Status::internal(fmt::format("the window of rank {} cannot be mapped", peer));
    } else {
      at(peer) = SharedWindow(base, options_.window_bytes, size());
    }
  }
  return agree(status, works, why_not);
}

// Connects, and proves by a message each way that the hosts' networks let UCX through: its port is
// another than Control's.
Status UcxTransport::connect_network(const std::vector<Bytes>& offers) {
  for (int peer = 0; peer < size(); ++peer) {
    ASSIGN_OR_RETURN(const auto offer, offer_of(peer, offers[static_cast<size_t>(peer)]));
    if (!is_far(peer)) continue;
    RETURN_IF_ERROR(network_->connect(peer, offer, lanes_[static_cast<size_t>(peer)]));
  }
  network_->start();
  const Deadline deadline(options_.dist_timeout / 2);
  for (int peer = 0; peer < size(); ++peer) {
    while (is_far(peer) && !network_->heard(peer)) {
      if (control_->dead(peer) || deadline.passed()) {
        return Status::rank_lost(fmt::format(
            "rank {} cannot be reached over {} although its control socket is open; a firewall "
            "between the hosts must let through all ports above 1023",
            peer, lane(peer)));
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  return Status::ok();
}

Status UcxTransport::open_network() {
  network_ = std::make_unique<UcxNetwork>(own(), options_.window_bytes, rank(), size());
  const Status opened = network_->open(options_.network_address);
  std::vector<Bytes> offers;
  RETURN_IF_ERROR(offer_all(opened ? network_->offer() : Result<Bytes>(opened), offers));
  bool works = false;
  Status why_not;
  RETURN_IF_ERROR(agree(connect_network(offers), works, why_not));
  return works ? Status::ok() : why_not;
}

Status UcxTransport::open() {
  RETURN_IF_ERROR(find_hosts());
  bool works = false;
  Status why_not;
  for (const std::string& memory : options_.memories) {
    RETURN_IF_ERROR(open_memory(memory, works, why_not));
    if (works) break;
  }
  if (!works) return why_not;
  control_->on_beat([window = own()] { window.live(); });
  if (any_far_) RETURN_IF_ERROR(open_network());
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    spdlog::info("exchange: rank {} to rank {} over {}", rank(), peer, lane(peer));
  }
  return Status::ok();
}

}  // namespace

Result<std::shared_ptr<Transport>> make_ucx_transport(std::shared_ptr<Control> control,
                                                      const UcxOptions& options) {
  auto transport = std::make_shared<UcxTransport>(std::move(control), options);
  RETURN_IF_ERROR(transport->open());
  return std::shared_ptr<Transport>(std::move(transport));
}

}  // namespace sortie::exchange
