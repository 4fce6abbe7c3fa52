#include "exchange/launch/rendezvous.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <list>
#include <optional>
#include <thread>

#include "base/log.h"

namespace sortie::exchange {
namespace {

constexpr auto kHandshakeTime = std::chrono::seconds(5);
constexpr size_t kMostStrangers = 64;  // connections that have not proven anything yet
constexpr int kMostWarnings = 8;       // of refused connections; a scanner makes thousands
constexpr auto kFirstRetry = std::chrono::milliseconds(20);
constexpr auto kLastRetry = std::chrono::milliseconds(500);

struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

std::string text_of(const Address& a) {
  char host[NI_MAXHOST] = {};
  const int error = getnameinfo(a.get(), a.length, host, sizeof host, nullptr, 0, NI_NUMERICHOST);
  return error == 0 ? host : "an unknown address";
}

bool is_loopback(const Address& a) {
  if (a.storage.ss_family == AF_INET) {
    const auto& in = reinterpret_cast<const sockaddr_in&>(a.storage);
    return (ntohl(in.sin_addr.s_addr) >> 24) == 127;
  }
  return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(a.storage).sin6_addr);
}

Result<Address> resolve(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0 || found == nullptr) {
    return Status::invalid(
        fmt::format("the host {} of rank 0 has no address ({}); see "
                    "--dist-init-addr, or MASTER_ADDR of the launcher",
                    host, gai_strerror(error)));
  }
  // Hosts may order a name's addresses differently, and must agree: IPv4 first.
  const addrinfo* best = found;
  while (best != nullptr && best->ai_family != AF_INET) best = best->ai_next;
  if (best == nullptr) best = found;
  Address a;
  std::memcpy(&a.storage, best->ai_addr, best->ai_addrlen);
  a.length = best->ai_addrlen;
  freeaddrinfo(found);
  return a;
}

bool is_number(const std::string& host) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST;
  addrinfo* found = nullptr;
  const bool number = getaddrinfo(host.c_str(), nullptr, &hints, &found) == 0;
  if (number) freeaddrinfo(found);
  return number;
}

// Where rank 0 listens. Debian's /etc/hosts gives a host's own name the address 127.0.1.1, which
// the other hosts, who know it by another, cannot reach: then on all addresses.
Result<Address> listening_address(const Meeting& m) {
  ASSIGN_OR_RETURN(const Address a, resolve(m.host, m.port));
  const bool own_name = is_loopback(a) && !is_number(m.host) && m.host != "localhost";
  if (m.me.nodes == 1 || !own_name) return a;
  return resolve("0.0.0.0", m.port);
}

Status check_key(const Meeting& m, const Address& a) {
  if (!m.key.open() || m.insecure || is_loopback(a)) return Status::ok();
  return Status::usage(fmt::format(
      "{} is an address that other hosts reach: give --cluster-key-file FILE, the same on all "
      "nodes "
      "(openssl rand -hex 32 > FILE; chmod 600 FILE), or --insecure where everybody may join",
      text_of(a)));
}

// Heartbeats are small and must not wait for each other, and on a lossy line a thin stream must not
// back off for ever longer: a peer's silence is what its loss is judged by. No keepalive: the
// exchange's own deadline knows better.
void tune(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, &on, sizeof on);
}

std::string place(const Meeting& m) { return fmt::format("{}:{}", m.host, m.port); }

// ---- Rank 0

struct Connection {
  UniqueFd fd;
  std::string address;
  TimePoint until;  // for its handshake
  HandshakeAtZero handshake;
  Bytes in;  // of the message that is not whole yet
  FrameReader frames{kMostJoinBytes};
  bool joined = false;
  Member member;
  bool gone = false;
};

// Small messages into an empty socket buffer: what does not fit at once goes nowhere.
bool send_now(const UniqueFd& fd, const Bytes& message) {
  return message.empty() ||
         send(fd.get(), message.data(), message.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
             static_cast<ssize_t>(message.size());
}

Bytes refusal(const std::string& sentence) {
  return make_frame(kRefusedFrame, std::as_bytes(std::span<const char>(sentence)));
}

class Host {
 public:
  Host(const Meeting& meeting, int first)
      : meeting_(meeting),
        first_(static_cast<uint32_t>(first)),
        missing_(static_cast<int>(meeting.me.size) - first) {}

  Status listen();
  Result<std::vector<UniqueFd>> run();

 private:
  void accept_all();
  void read(Connection& c);
  bool take(Connection& c, std::span<const std::byte>& bytes);
  void join(Connection& c, const Frame& frame);
  void drop(Connection& c, const std::string& why);
  void check_time();
  Status failed(const std::string& sentence);
  std::string missing_ranks() const;
  Connection* at(uint32_t rank);

  const Meeting& meeting_;
  const uint32_t first_;
  int missing_;
  UniqueFd listener_;
  std::list<Connection> connections_;
  std::string failure_;  // ends the meeting
  int warnings_ = 0;
  std::string last_refused_;
};

Status Host::listen() {
  ASSIGN_OR_RETURN(const Address a, listening_address(meeting_));
  RETURN_IF_ERROR(check_key(meeting_, a));
  listener_ = UniqueFd(
      socket(a.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP));
  const int on = 1;
  setsockopt(listener_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);  // its last use lingers
  if (bind(listener_.get(), a.get(), a.length) != 0 || ::listen(listener_.get(), 128) != 0) {
    const int error = errno;
    if (error == EADDRINUSE) {
      return Status::exhausted(fmt::format(
          "rank 0 cannot listen on {}: the port is in use; end what uses it, or give another with "
          "--dist-init-addr on all nodes",
          place(meeting_)));
    }
    if (error == EADDRNOTAVAIL) {
      return Status::usage(fmt::format(
          "rank 0 cannot listen on {}: this host does not have that address; node 0 must be the "
          "host that --dist-init-addr (or MASTER_ADDR) names",
          place(meeting_)));
    }
    return Status::exhausted(
        fmt::format("rank 0 cannot listen on {}: {}", place(meeting_), strerror(error)));
  }
  return Status::ok();
}

Connection* Host::at(uint32_t rank) {
  for (Connection& c : connections_) {
    if (c.joined && c.member.rank == rank) return &c;
  }
  return nullptr;
}

std::string Host::missing_ranks() const {
  std::string names;
  for (uint32_t r = first_; r < meeting_.me.size; ++r) {
    if (const_cast<Host*>(this)->at(r) == nullptr) {
      names += fmt::format("{}{}", names.empty() ? "" : ", ", r);
    }
  }
  return names;
}

void Host::accept_all() {
  while (true) {
    Address a;
    a.length = sizeof a.storage;
    UniqueFd fd(accept4(listener_.get(), reinterpret_cast<sockaddr*>(&a.storage), &a.length,
                        SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd.open()) return;
    tune(fd.get());
    const auto strangers = std::count_if(connections_.begin(), connections_.end(),
                                         [](const Connection& c) { return !c.joined; });
    if (static_cast<size_t>(strangers) >= kMostStrangers) {
      // The oldest has had the most time; a rank that is pushed out tries again.
      const auto oldest = std::find_if(connections_.begin(), connections_.end(),
                                       [](const Connection& c) { return !c.joined; });
      connections_.erase(oldest);
    }
    connections_.push_back({.fd = std::move(fd),
                            .address = text_of(a),
                            .until = Clock::now() + kHandshakeTime,
                            .handshake = HandshakeAtZero(meeting_.key)});
  }
}

void Host::drop(Connection& c, const std::string& why) {
  c.gone = true;
  last_refused_ = fmt::format("a connection from {} was refused: {}", c.address, why);
  if (warnings_++ < kMostWarnings) spdlog::warn("{}", last_refused_);
}

void Host::read(Connection& c) {
  std::byte buffer[4096];
  const ssize_t n = recv(c.fd.get(), buffer, sizeof buffer, MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (n <= 0) {
    c.gone = true;
    if (c.joined)
      failure_ = fmt::format(
          "rank {} on {} ended while the group was waiting for {}; "
          "see its own message",
          c.member.rank, c.member.host, missing_ranks());
    return;
  }
  std::span<const std::byte> bytes(buffer, static_cast<size_t>(n));
  while (!bytes.empty() && !c.gone) {
    if (!take(c, bytes)) return;
  }
}

// Takes what it can of the bytes; false if more are needed.
bool Host::take(Connection& c, std::span<const std::byte>& bytes) {
  if (c.handshake.state() == Handshake::State::kGoing) {
    const size_t n = std::min(bytes.size(), c.handshake.wants() - c.in.size());
    c.in.insert(c.in.end(), bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(n));
    bytes = bytes.subspan(n);
    if (c.in.size() < c.handshake.wants()) return false;
    const Bytes reply = c.handshake.take(c.in);
    c.in.clear();
    if (!send_now(c.fd, reply)) c.gone = true;
    if (c.handshake.state() == Handshake::State::kRefused) {
      drop(c, refusal_at_rank_0(c.handshake.verdict()));
    }
    return true;
  }
  if (c.joined) {
    c.gone = true;
    failure_ =
        fmt::format("rank {} on {} speaks before it was welcomed", c.member.rank, c.member.host);
    return true;
  }
  c.frames.push(bytes);
  bytes = {};
  Frame frame;
  if (c.frames.next(frame)) {
    join(c, frame);
  } else if (c.frames.broken()) {
    drop(c, "it joined with a frame that is too long");
  }
  return true;
}

void Host::join(Connection& c, const Frame& frame) {
  if (frame.type != kJoinFrame || c.frames.held() != 0 || !decode_member(frame.payload, c.member)) {
    drop(c, "it joined with a malformed frame");
    return;
  }
  const Member& m = c.member;
  if (m.job != meeting_.me.job) {
    const std::string sentence = fmt::format(
        "{} belongs to another group (job '{}', this rank is of '{}'); give each group a port of "
        "its own with --dist-init-addr",
        place(meeting_), meeting_.me.job, m.job);
    (void)send_now(c.fd, refusal(sentence));
    drop(c, "it belongs to another group");
    return;
  }
  failure_ = disagreement(meeting_.me, m);
  if (failure_.empty() && m.rank < first_) {
    failure_ = fmt::format(
        "rank {} on {} joined, but node 0 started that rank itself; give each "
        "node another --node-rank",
        m.rank, m.host);
  }
  if (const Connection* other = at(m.rank); failure_.empty() && other != nullptr) {
    failure_ = fmt::format(
        "rank {} came twice, from {} and from {}; give each node another --node-rank, and each "
        "group a port of its own",
        m.rank, other->member.host, m.host);
  }
  c.joined = true;  // a failure is told to it too
  if (failure_.empty()) --missing_;
}

void Host::check_time() {
  const TimePoint now = Clock::now();
  for (Connection& c : connections_) {
    if (!c.joined && !c.gone && now >= c.until) drop(c, "it proved nothing within 5 s");
  }
}

Status Host::failed(const std::string& sentence) {
  for (const Connection& c : connections_) {
    if (c.joined && !c.gone) (void)send_now(c.fd, refusal(sentence));
  }
  return Status::rank_lost(sentence);
}

Result<std::vector<UniqueFd>> Host::run() {
  const Deadline deadline(meeting_.timeout);
  std::vector<pollfd> fds;
  while (missing_ > 0) {
    if (deadline.passed()) {
      return failed(fmt::format(
          "rank {} did not join rank 0 on {} within {:.3g} s (--dist-timeout); see whether {} "
          "started and can reach that address{}",
          missing_ranks(), place(meeting_), to_seconds(meeting_.timeout),
          missing_ > 1 ? "they were" : "it was",
          last_refused_.empty() ? "" : "; " + last_refused_));
    }
    fds.assign(1, {.fd = listener_.get(), .events = POLLIN, .revents = 0});
    TimePoint next = deadline.at();
    for (const Connection& c : connections_) {
      fds.push_back({.fd = c.fd.get(), .events = POLLIN, .revents = 0});
      if (!c.joined) next = std::min(next, c.until);
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(Deadline(next).left()).count();
    poll(fds.data(), fds.size(), static_cast<int>(left));
    size_t i = 1;
    for (Connection& c : connections_) {
      if (fds[i++].revents != 0) read(c);
      if (!failure_.empty()) return failed(failure_);
    }
    check_time();
    connections_.remove_if([](const Connection& c) { return c.gone; });
    if (fds[0].revents != 0) accept_all();
  }
  std::vector<UniqueFd> sockets(meeting_.me.size);
  for (Connection& c : connections_) {
    if (!c.joined) continue;
    (void)send_now(c.fd, make_frame(kWelcomeFrame, {}));  // a break shows on the socket
    sockets[c.member.rank] = std::move(c.fd);
  }
  return sockets;
}

// ---- The other ranks

// Waits for events on a socket; false at the deadline.
bool wait_for(int fd, int events, const Deadline& deadline) {
  while (true) {
    pollfd p{.fd = fd, .events = static_cast<short>(events), .revents = 0};
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline.left()).count();
    const int n = poll(&p, 1, static_cast<int>(left));
    if (n > 0) return true;
    if (n == 0 && deadline.passed()) return false;
  }
}

enum class Io : uint8_t { kOk, kClosed, kLate };

Io read_exactly(int fd, std::span<std::byte> into, const Deadline& deadline) {
  while (!into.empty()) {
    if (!wait_for(fd, POLLIN, deadline)) return Io::kLate;
    const ssize_t n = recv(fd, into.data(), into.size(), MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (n <= 0) return Io::kClosed;
    into = into.subspan(static_cast<size_t>(n));
  }
  return Io::kOk;
}

Io write_exactly(int fd, std::span<const std::byte> from, const Deadline& deadline) {
  while (!from.empty()) {
    if (!wait_for(fd, POLLOUT, deadline)) return Io::kLate;
    const ssize_t n = send(fd, from.data(), from.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (n <= 0) return Io::kClosed;
    from = from.subspan(static_cast<size_t>(n));
  }
  return Io::kOk;
}

// One try; a closed fd and errno if nobody listens.
UniqueFd try_connect(const Address& a, const Deadline& deadline) {
  UniqueFd fd(socket(a.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP));
  if (!fd.open()) return fd;
  if (connect(fd.get(), a.get(), a.length) != 0) {
    int error = errno;
    if (error == EINPROGRESS) {
      socklen_t length = sizeof error;
      if (!wait_for(fd.get(), POLLOUT, deadline)) {
        error = ETIMEDOUT;
      } else {
        getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
      }
    }
    if (error != 0) {
      fd.reset();
      errno = error;
      return fd;
    }
  }
  tune(fd.get());
  return fd;
}

// Rank 0 may start later than this rank, so refused connections are tried again.
Result<UniqueFd> connect_until(const Meeting& m, const Address& a, const Deadline& deadline) {
  Duration pause = kFirstRetry;
  while (true) {
    UniqueFd fd = try_connect(a, deadline);
    if (fd.open()) return fd;
    const int error = errno;
    if (deadline.left() <= pause) {
      return Status::rank_lost(
          fmt::format("rank {} cannot reach rank 0 on {}: {}, for {:.3g} s (--dist-timeout); see "
                      "whether node 0 "
                      "was started with this address and no firewall is between",
                      m.me.rank, place(m), strerror(error), to_seconds(m.timeout)));
    }
    std::this_thread::sleep_for(pause);
    pause = std::min<Duration>(pause * 2, kLastRetry);
  }
}

Status lost(const Meeting& m, Io how, const std::string& when) {
  if (how == Io::kClosed) {
    return Status::rank_lost(
        fmt::format("rank 0 on {} closed the connection {}; see its own "
                    "message, and whether another program has that port",
                    place(m), when));
  }
  return Status::rank_lost(
      fmt::format("rank {} waited for rank 0 on {} {} for {:.3g} s "
                  "(--dist-timeout); see whether all nodes were started",
                  m.me.rank, place(m), when, to_seconds(m.timeout)));
}

Status shake_hands(const Meeting& m, const UniqueFd& fd, const Deadline& deadline) {
  HandshakeAtRank handshake(m.key);
  Bytes out = handshake.hello();
  while (true) {
    if (const Io io = write_exactly(fd.get(), out, deadline); io != Io::kOk) {
      return lost(m, io, "during the handshake");
    }
    if (handshake.state() == Handshake::State::kDone) return Status::ok();
    Bytes in(handshake.wants());
    if (const Io io = read_exactly(fd.get(), in, deadline); io != Io::kOk) {
      return lost(m, io, "during the handshake");
    }
    out = handshake.take(in);
    if (handshake.state() == Handshake::State::kRefused) {
      return Status::invalid(fmt::format("rank {} cannot join rank 0 on {}: {}", m.me.rank,
                                         place(m), refusal_at_rank(handshake.verdict())));
    }
  }
}

Status be_welcomed(const Meeting& m, const UniqueFd& fd, const Deadline& deadline) {
  const Bytes join = make_frame(kJoinFrame, encode_member(m.me));
  if (const Io io = write_exactly(fd.get(), join, deadline); io != Io::kOk) {
    return lost(m, io, "before all ranks had come");
  }
  // Not a byte more than the frame: Control's own may follow.
  FrameHead head{};
  Io io = read_exactly(fd.get(), std::as_writable_bytes(std::span(&head, 1)), deadline);
  if (io != Io::kOk) return lost(m, io, "before all ranks had come");
  Bytes payload(std::min(head.length, kMostJoinBytes));
  io = read_exactly(fd.get(), payload, deadline);
  if (io != Io::kOk) return lost(m, io, "before all ranks had come");
  if (head.type == kWelcomeFrame) return Status::ok();
  return Status::rank_lost(std::string(reinterpret_cast<const char*>(payload.data()),
                                       head.type == kRefusedFrame ? payload.size() : 0));
}

}  // namespace

Result<std::vector<UniqueFd>> hold_meeting(const Meeting& meeting, int first) {
  Host host(meeting, first);
  RETURN_IF_ERROR(host.listen());
  return host.run();
}

Result<UniqueFd> join_meeting(const Meeting& meeting) {
  const Deadline deadline(meeting.timeout);
  ASSIGN_OR_RETURN(const Address address, resolve(meeting.host, meeting.port));
  RETURN_IF_ERROR(check_key(meeting, address));
  ASSIGN_OR_RETURN(UniqueFd fd, connect_until(meeting, address, deadline));
  RETURN_IF_ERROR(shake_hands(meeting, fd, deadline));
  // Rank 0, which knows who is missing, is to speak first.
  const Deadline later(deadline.at() + std::min<Duration>(meeting.timeout / 4, seconds(1)));
  RETURN_IF_ERROR(be_welcomed(meeting, fd, later));
  return fd;
}

std::string local_address(const UniqueFd& socket) {
  Address a;
  a.length = sizeof a.storage;
  if (getsockname(socket.get(), reinterpret_cast<sockaddr*>(&a.storage), &a.length) != 0) return "";
  return text_of(a);
}

}  // namespace sortie::exchange
