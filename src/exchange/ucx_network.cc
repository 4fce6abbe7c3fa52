#include "exchange/ucx_network.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "exchange/launch/cluster_key.h"
#include "exchange/ucx_lane.h"

namespace sortie::exchange {
namespace {

constexpr unsigned kMessage = 1;  // the id of the one kind of active message
// Puts beyond this leave at once instead of with the signal, so that the network works while the
// step still copies.
constexpr size_t kFull = 256 << 10;
constexpr auto kFarewell = std::chrono::seconds(1);
constexpr int kPollMs = 100;  // the descriptor wakes earlier

// The network interface that has an address.
std::string interface_of(const std::string& address) {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return "";
  std::string name;
  for (const ifaddrs* i = all; i != nullptr && name.empty(); i = i->ifa_next) {
    if (i->ifa_addr == nullptr) continue;
    char text[INET6_ADDRSTRLEN] = {};
    if (i->ifa_addr->sa_family == AF_INET) {
      inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(i->ifa_addr)->sin_addr, text,
                sizeof text);
    } else if (i->ifa_addr->sa_family == AF_INET6) {
      inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6*>(i->ifa_addr)->sin6_addr, text,
                sizeof text);
    }
    if (address == text) name = i->ifa_name;
  }
  freeifaddrs(all);
  return name;
}

// "mlx5_0:1", for each port of the host's RDMA devices.
std::vector<std::string> rdma_ports() {
  namespace fs = std::filesystem;
  std::vector<std::string> ports;
  std::error_code error;
  for (const auto& device : fs::directory_iterator("/sys/class/infiniband", error)) {
    for (const auto& port : fs::directory_iterator(device.path() / "ports", error)) {
      ports.push_back(device.path().filename().string() + ":" + port.path().filename().string());
    }
  }
  std::sort(ports.begin(), ports.end());
  return ports;
}

uint64_t random_token() {
  const Nonce nonce = random_nonce();
  uint64_t token = 0;
  std::memcpy(&token, nonce.data(), sizeof token);
  return token;
}

}  // namespace

struct UcxNetwork::Message {
  int peer = 0;
  Head head{};
  std::vector<Place> places;
  Bytes payload;  // the bytes of the puts, and behind them the places
  UcxNetwork* network = nullptr;
};

UcxNetwork::UcxNetwork(SharedWindow own, int64_t window_bytes, int rank, int ranks)
    : own_(own),
      window_bytes_(window_bytes),
      rank_(rank),
      token_(random_token()),
      peers_(static_cast<size_t>(ranks)),
      bell_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  CHECK(bell_.open(), "eventfd");
}

Status UcxNetwork::open(const std::string& address) {
  ASSIGN_OR_RETURN(api_, load_ucx());
  std::string devices = interface_of(address);
  if (devices.empty()) {
    return Status::exhausted(
        fmt::format("no network interface of this host has the address {}", address));
  }
  std::string transports = "tcp";
  for (const std::string& port : rdma_ports()) {
    devices += "," + port;
    transports = "tcp,ib";
  }
  // Control's heartbeats and the exchange's deadline decide who is lost; UCX's own keepalives would
  // give a peer up at another time, for instance during a cut that TCP still survives.
  const std::pair<const char*, const char*> settings[] = {
      {"TLS", transports.c_str()}, {"NET_DEVICES", devices.c_str()}, {"KEEPALIVE_INTERVAL", "inf"},
      {"TCP_KEEPIDLE", "inf"},     {"TCP_TX_SEG_SIZE", "64k"},       {"TCP_RX_SEG_SIZE", "64k"}};
  ucp_config_t* config = nullptr;
  ucs_status_t status = api_->config_read("SORTIE", nullptr, &config);
  for (const auto& [name, value] : settings) {
    if (status == UCS_OK) status = api_->config_modify(config, name, value);
    if (status != UCS_OK) {
      return Status::internal(
          fmt::format("UCX setting {}={}: {}", name, value, api_->status_string(status)));
    }
  }
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  status = api_->init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &context_);
  api_->config_release(config);
  if (status == UCS_OK) {
    ucp_worker_params_t worker{};
    worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    worker.thread_mode = UCS_THREAD_MODE_SERIALIZED;  // made here, then the thread's
    status = api_->worker_create(context_, &worker, &worker_);
  }
  if (status == UCS_OK) {
    ucp_am_handler_param_t handler{};
    handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                         UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
    handler.id = kMessage;
    handler.flags = UCP_AM_FLAG_WHOLE_MSG;
    handler.cb = on_message;
    handler.arg = this;
    status = api_->worker_set_am_recv_handler(worker_, &handler);
  }
  if (status == UCS_OK) return Status::ok();
  return Status::exhausted(
      fmt::format("UCX over {} on {}: {}", transports, devices, api_->status_string(status)));
}

Result<Bytes> UcxNetwork::offer() const {
  ucp_address_t* address = nullptr;
  size_t length = 0;
  if (const ucs_status_t s = api_->worker_get_address(worker_, &address, &length); s != UCS_OK) {
    return Status::internal(fmt::format("UCX address: {}", api_->status_string(s)));
  }
  Bytes blob(sizeof token_ + length);
  std::memcpy(blob.data(), &token_, sizeof token_);
  std::memcpy(blob.data() + sizeof token_, address, length);
  api_->worker_release_address(worker_, address);
  return blob;
}

Status UcxNetwork::connect(int peer, std::span<const std::byte> offer, std::string& lane) {
  Peer& p = peers_[static_cast<size_t>(peer)];
  if (offer.size() <= sizeof p.token) {
    return Status::internal(fmt::format("rank {}: malformed network offer", peer));
  }
  std::memcpy(&p.token, offer.data(), sizeof p.token);
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(offer.data() + sizeof p.token);
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.arg = &p;
  // Control sees deaths; here it only matters that nothing more is sent.
  params.err_handler.cb = [](void* failed, ucp_ep_h, ucs_status_t) {
    static_cast<Peer*>(failed)->failed = true;
  };
  if (const ucs_status_t s = api_->ep_create(worker_, &params, &p.endpoint); s != UCS_OK) {
    p.endpoint = nullptr;
    return Status::internal(fmt::format("no way to rank {} over the network of this host: {}", peer,
                                        api_->status_string(s)));
  }
  lane = first_lane(*api_, p.endpoint);
  return Status::ok();
}

void UcxNetwork::start() {
  for (size_t peer = 0; peer < peers_.size(); ++peer) {
    if (peers_[peer].endpoint != nullptr) flush(static_cast<int>(peer), -1, 0);
  }
  thread_ = std::thread([this] { loop(); });
}

// ---- The step's side

UcxNetwork::Message& UcxNetwork::filling(int peer) {
  std::unique_ptr<Message>& message = peers_[static_cast<size_t>(peer)].filling;
  if (!message) {
    const std::scoped_lock lock(mutex_);
    if (!spare_.empty()) {
      message = std::move(spare_.back());
      spare_.pop_back();
    }
  }
  if (!message) message = std::make_unique<Message>();
  return *message;
}

void UcxNetwork::put(int peer, int64_t offset, const void* data, int64_t bytes) {
  const auto* from = static_cast<const std::byte*>(data);
  while (bytes > 0) {
    Message& m = filling(peer);
    const auto room = static_cast<int64_t>(kFull - m.payload.size());
    const int64_t n = std::min(bytes, room);
    m.places.push_back({.offset = offset, .bytes = n});
    m.payload.insert(m.payload.end(), from, from + n);
    from += n;
    offset += n;
    bytes -= n;
    if (m.payload.size() >= kFull) flush(peer, -1, 0);
  }
}

void UcxNetwork::signal(int peer, int index, uint64_t epoch) { flush(peer, index, epoch); }

void UcxNetwork::flush(int peer, int32_t index, uint64_t epoch) {
  Message& m = filling(peer);
  Peer& p = peers_[static_cast<size_t>(peer)];
  m.peer = peer;
  m.network = this;
  m.head = {.token = p.token,
            .number = p.next_number++,
            .epoch = epoch,
            .source = static_cast<uint32_t>(rank_),
            .index = index,
            .places = static_cast<uint32_t>(m.places.size())};
  const auto table = std::as_bytes(std::span(m.places));
  m.payload.insert(m.payload.end(), table.begin(), table.end());
  {
    const std::scoped_lock lock(mutex_);
    queue_.push_back(std::move(p.filling));
  }
  const uint64_t one = 1;
  if (write(bell_.get(), &one, sizeof one) < 0) return;  // a full counter rings as well
}

// ---- The thread's side

void UcxNetwork::loop() {
  int descriptor = -1;
  CHECK(api_->worker_get_efd(worker_, &descriptor) == UCS_OK, "UCX's event descriptor");
  while (send_queued()) {
    while (api_->worker_progress(worker_) != 0) {
    }
    if (api_->worker_arm(worker_) != UCS_OK) continue;  // something came in between
    pollfd fds[] = {{.fd = descriptor, .events = POLLIN, .revents = 0},
                    {.fd = bell_.get(), .events = POLLIN, .revents = 0}};
    poll(fds, 2, kPollMs);
    uint64_t rings = 0;
    if (fds[1].revents != 0 && read(bell_.get(), &rings, sizeof rings) < 0) rings = 0;
  }
  farewell();
}

// False when it is time to leave.
bool UcxNetwork::send_queued() {
  std::deque<std::unique_ptr<Message>> queued;
  bool stop = false;
  {
    const std::scoped_lock lock(mutex_);
    queued.swap(queue_);
    stop = stop_;
  }
  for (auto& message : queued) send(std::move(message));
  return !stop;
}

void UcxNetwork::send(std::unique_ptr<Message> message) {
  Message* m = message.release();  // UCX's until it is sent
  const Peer& peer = peers_[static_cast<size_t>(m->peer)];
  if (peer.failed) return finish(m);
  ucp_request_param_t param{};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  // Rendezvous would ask first, which costs a round trip, and then move the bytes by slow puts.
  param.flags = UCP_AM_SEND_FLAG_EAGER;
  param.cb.send = on_sent;
  param.user_data = m;
  void* request = api_->am_send_nbx(peer.endpoint, kMessage, &m->head, sizeof m->head,
                                    m->payload.data(), m->payload.size(), &param);
  if (!UCS_PTR_IS_PTR(request)) return finish(m);  // done, or failed: then control will tell
  ++in_flight_;
}

void UcxNetwork::on_sent(void* request, ucs_status_t /*status*/, void* message) {
  auto* m = static_cast<Message*>(message);
  UcxNetwork& n = *m->network;
  --n.in_flight_;
  n.finish(m);
  n.api_->request_free(request);
}

void UcxNetwork::finish(Message* message) {
  message->places.clear();
  message->payload.clear();
  const std::scoped_lock lock(mutex_);
  spare_.emplace_back(message);
}

ucs_status_t UcxNetwork::on_message(void* self, const void* header, size_t header_length,
                                    void* data, size_t length, const ucp_am_recv_param_t* param) {
  Head head{};
  const bool whole = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0;
  if (whole && header_length == sizeof head) {
    std::memcpy(&head, header, sizeof head);
    static_cast<UcxNetwork*>(self)->receive(head, {static_cast<const std::byte*>(data), length});
  }
  return UCS_OK;
}

// UCX's port is open to the network, so nothing in a message is believed: neither who sent it nor
// where its bytes belong.
void UcxNetwork::receive(const Head& head, std::span<const std::byte> data) {
  if (head.token != token_ || head.source >= peers_.size() || head.index >= kSignals ||
      head.index < -1 || static_cast<int>(head.source) == rank_) {
    return;
  }
  Peer& peer = peers_[head.source];
  const size_t table = size_t{head.places} * sizeof(Place);
  if (table > data.size() || head.number < peer.next_expected) return;
  const auto bytes = data.first(data.size() - table);
  const auto places = data.last(table);
  size_t at = 0;
  for (uint32_t i = 0; i < head.places; ++i) {
    Place place{};
    std::memcpy(&place, places.data() + i * sizeof place, sizeof place);
    if (place.bytes < 0 || place.offset < 0 || place.bytes > window_bytes_ ||
        place.offset > window_bytes_ - place.bytes ||
        static_cast<size_t>(place.bytes) > bytes.size() - at) {
      return;
    }
    own_.put(place.offset, bytes.data() + at, place.bytes);
    at += static_cast<size_t>(place.bytes);
  }
  peer.early[head.number] = {.index = head.index, .epoch = head.epoch};
  while (!peer.early.empty() && peer.early.begin()->first == peer.next_expected) {
    const Signalled s = peer.early.begin()->second;
    if (s.index >= 0) own_.signal(s.index, static_cast<int>(head.source), s.epoch);
    peer.early.erase(peer.early.begin());
    ++peer.next_expected;
  }
  peer.heard = true;
}

// The others may still wait for the last signals of this rank.
void UcxNetwork::farewell() {
  const Deadline deadline(kFarewell);
  while (send_queued() || in_flight_ > 0) {
    if (deadline.passed()) break;
    if (api_->worker_progress(worker_) == 0) std::this_thread::yield();
  }
  for (Peer& peer : peers_) {
    if (peer.endpoint == nullptr) continue;
    ucp_request_param_t param{};
    // A close that is not forced flushes first.
    if (peer.failed || deadline.passed()) {
      param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
      param.flags = UCP_EP_CLOSE_FLAG_FORCE;
    }
    void* request = api_->ep_close_nbx(peer.endpoint, &param);
    if (!UCS_PTR_IS_PTR(request)) continue;
    while (api_->request_check_status(request) == UCS_INPROGRESS && !deadline.passed()) {
      api_->worker_progress(worker_);
    }
    api_->request_free(request);
  }
}

UcxNetwork::~UcxNetwork() {
  if (thread_.joinable()) {
    {
      const std::scoped_lock lock(mutex_);
      stop_ = true;
    }
    const uint64_t one = 1;
    if (write(bell_.get(), &one, sizeof one) < 0) spdlog::debug("the bell rings already");
    thread_.join();
  }
  if (worker_ != nullptr) api_->worker_destroy(worker_);
  if (context_ != nullptr) api_->cleanup(context_);
}

}  // namespace sortie::exchange
