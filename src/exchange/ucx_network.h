#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"
#include "exchange/control.h"
#include "exchange/shared_window.h"
#include "exchange/ucx_api.h"

namespace sortie::exchange {

// One rank's lanes to ranks of other hosts: UCX active messages over TCP, or RDMA where there is.
// (One-sided puts over TCP reach 0.4 to 0.65 GB/s, active messages 3.8 to 6.2.)
//
// A message carries the puts since the last one and the signal behind them: the bytes, a table of
// their places, and in its head the signal. The receiver copies the bytes to their places in the
// window, then stores the signal, in the order of the messages' numbers. So a signal is never seen
// before the puts that preceded it, whatever order messages arrive in.
//
// A thread of its own owns the UCX worker: bytes come in and go out while the rank's step computes,
// and what arrives rings the window's doorbell as a put from the same host does.
class UcxNetwork {
 public:
  // `address`: this host's in the network of the group; its interface is the one that TCP uses.
  UcxNetwork(SharedWindow own, int64_t window_bytes, int rank, int ranks);
  ~UcxNetwork();  // sends what is queued, for a second at most
  UcxNetwork(const UcxNetwork&) = delete;
  UcxNetwork& operator=(const UcxNetwork&) = delete;

  Status open(const std::string& address);
  // What a peer's connect() takes: this rank's token and worker address. Travels over Control only.
  Result<Bytes> offer() const;
  // Before start().
  Status connect(int peer, std::span<const std::byte> offer, std::string& lane);
  void start();
  // Has a message of this peer come? The first one is sent by start().
  bool heard(int peer) const { return peers_[static_cast<size_t>(peer)].heard; }

  // As Transport's; only the thread that runs the rank's steps calls them.
  void put(int peer, int64_t offset, const void* data, int64_t bytes);
  void signal(int peer, int index, uint64_t epoch);

 private:
  struct Message;
  struct Place {
    int64_t offset;
    int64_t bytes;
  };
  struct Head {
    uint64_t token;   // of the receiver: who does not know it is no peer
    uint64_t number;  // of this message among those from `source`
    uint64_t epoch;
    uint32_t source;
    int32_t index;  // of the signal; -1: none
    uint32_t places;
    uint32_t unused;
  };
  struct Signalled {
    int32_t index;
    uint64_t epoch;
  };
  struct Peer {
    ucp_ep_h endpoint = nullptr;
    uint64_t token = 0;
    std::atomic<bool> heard{false};
    // The step's: the message being filled.
    std::unique_ptr<Message> filling;
    uint64_t next_number = 0;
    // The thread's.
    std::atomic<bool> failed{false};
    uint64_t next_expected = 0;
    std::map<uint64_t, Signalled> early;  // messages that came before an older one
  };

  static ucs_status_t on_message(void* self, const void* header, size_t header_length, void* data,
                                 size_t length, const ucp_am_recv_param_t* param);
  void receive(const Head& head, std::span<const std::byte> data);
  Message& filling(int peer);
  void flush(int peer, int32_t index, uint64_t epoch);
  void loop();
  bool send_queued();
  void send(std::unique_ptr<Message> message);
  static void on_sent(void* request, ucs_status_t status, void* message);
  void finish(Message* message);
  void farewell();

  const UcxApi* api_ = nullptr;
  const SharedWindow own_;
  const int64_t window_bytes_;
  const int rank_;
  const uint64_t token_;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  std::vector<Peer> peers_;  // by rank
  UniqueFd bell_;            // there is something to send, or to stop for

  std::mutex mutex_;
  std::deque<std::unique_ptr<Message>> queue_;
  std::vector<std::unique_ptr<Message>> spare_;  // messages keep their memory
  bool stop_ = false;
  int in_flight_ = 0;  // the thread's: sends that UCX has not finished
  std::thread thread_;
};

}  // namespace sortie::exchange
