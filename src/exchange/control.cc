#include "exchange/control.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "base/check.h"

namespace sortie::exchange {
namespace {

constexpr auto kBeatEvery = std::chrono::milliseconds(50);
constexpr auto kStopped = std::chrono::seconds(1);  // between two beats: this process was stopped
constexpr auto kFarewell = std::chrono::seconds(2);
constexpr auto kNetworkFarewell = std::chrono::seconds(5);  // TCP repeats what a line has lost
constexpr size_t kMostQueued = size_t{4} * Control::kMaxFrame;

// Control's own frames. A beat from rank 0 carries the age in ms of every rank's last sign of life,
// since the others do not see each other.
enum Reserved : uint32_t { kBeat = Control::kFirstReserved, kDeath, kGather, kGathered };

template <typename T>
std::span<const std::byte> bytes_of(const T* data, size_t n) {
  return std::as_bytes(std::span<const T>(data, n));
}

}  // namespace

void UniqueFd::reset() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

Control::Control(int rank, int size, std::vector<UniqueFd> links)
    : rank_(rank),
      size_(size),
      states_(static_cast<size_t>(size)),
      links_(static_cast<size_t>(size)),
      buffer_(size_t{256} << 10),
      bell_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      gathered_(static_cast<size_t>(size)) {
  CHECK(links.size() == static_cast<size_t>(rank == 0 ? size : 1), "links of the star");
  CHECK(bell_.open(), "eventfd");
  for (size_t i = 0; i < links.size(); ++i) {
    int domain = 0;
    socklen_t length = sizeof domain;
    getsockopt(links[i].get(), SOL_SOCKET, SO_DOMAIN, &domain, &length);
    links_[i].network = domain == AF_INET || domain == AF_INET6;
    links_[i].fd = std::move(links[i]);
  }
  thread_ = std::thread([this] { loop(); });
}

Control::~Control() {
  {
    const std::scoped_lock lock(mutex_);
    stop_ = true;
  }
  ring();
  thread_.join();
}

void Control::ring() {
  const uint64_t one = 1;
  // A full counter rings as well, so a failed write changes nothing.
  if (write(bell_.get(), &one, sizeof one) < 0) return;
}

void Control::send(int to, uint32_t type, std::span<const std::byte> payload) {
  CHECK(type < kFirstReserved && payload.size() <= kMaxFrame, "frame type or size");
  CHECK((to == 0) != (rank_ == 0) && to >= 0 && to < size_, "frames go to and from rank 0");
  queue(to, type, payload);
  ring();
}

void Control::queue(int to, uint32_t type, std::span<const std::byte> payload) {
  if (dead(to)) return;
  Bytes frame = make_frame(type, payload);
  const std::scoped_lock lock(mutex_);
  Link& l = link(to);
  if (l.ended) return;
  l.out_queued += frame.size();
  l.out.push_back(std::move(frame));
}

void Control::on_frame(FrameHandler handler) {
  {
    const std::scoped_lock lock(handler_mutex_);
    frame_handler_ = std::move(handler);
  }
  ring();
}

void Control::on_death(DeathHandler handler) {
  {
    const std::scoped_lock lock(handler_mutex_);
    death_handler_ = std::move(handler);
  }
  ring();
}

void Control::on_beat(std::function<void()> handler) {
  const std::scoped_lock lock(handler_mutex_);
  beat_handler_ = std::move(handler);
}

Result<std::vector<Bytes>> Control::all_gather(std::span<const std::byte> mine,
                                               Duration dist_timeout) {
  const Deadline deadline(dist_timeout);
  if (rank_ != 0) {
    queue(0, kGather, mine);
    ring();
  }
  // Rank 0 needs a blob of each other rank, the others rank 0's answer.
  const auto missing = [&] {
    std::string names;
    const int last = rank_ == 0 ? size_ : 1;
    for (int r = rank_ == 0 ? 1 : 0; r < last; ++r) {
      if (gathered_[static_cast<size_t>(r)].empty()) {
        names += fmt::format("{}{}", names.empty() ? "" : ", ", r);
      }
    }
    return names;
  };
  const auto lost = [&] {
    for (int r = 0; r < size_; ++r) {
      if (r != rank_ && dead(r) && (rank_ != 0 || gathered_[static_cast<size_t>(r)].empty())) {
        return r;
      }
    }
    return -1;
  };

  std::unique_lock lock(mutex_);
  const bool done =
      changed_.wait_until(lock, deadline.at(), [&] { return missing().empty() || lost() >= 0; });
  if (const std::string names = missing(); !names.empty()) {
    if (const int r = lost(); r >= 0) {
      return Status::rank_lost(fmt::format(
          "rank {} was lost during start-up: its process has ended; see its own message", r));
    }
    CHECK(!done, "a gather that ended for no reason");
    return Status::rank_lost(fmt::format(
        "rank {} did not join within {:.3g} s (--dist-timeout); see whether its process "
        "runs, and start the group again",
        names, to_seconds(dist_timeout)));
  }

  std::vector<Bytes> all(static_cast<size_t>(size_));
  if (rank_ == 0) {
    Bytes packed;
    for (int r = 0; r < size_; ++r) {
      auto& from = gathered_[static_cast<size_t>(r)];
      Bytes& blob = all[static_cast<size_t>(r)];
      if (r == 0) {
        blob.assign(mine.begin(), mine.end());
      } else {
        blob = std::move(from.front());
        from.pop_front();
      }
      const auto length = static_cast<uint32_t>(blob.size());
      const auto head = bytes_of(&length, 1);
      packed.insert(packed.end(), head.begin(), head.end());
      packed.insert(packed.end(), blob.begin(), blob.end());
    }
    lock.unlock();
    for (int r = 1; r < size_; ++r) queue(r, kGathered, packed);
    ring();
    return all;
  }
  const Bytes packed = std::move(gathered_[0].front());
  gathered_[0].pop_front();
  size_t at = 0;
  for (Bytes& blob : all) {
    uint32_t length = 0;
    if (packed.size() - at < sizeof length) return Status::internal("rank 0 sent a short answer");
    std::memcpy(&length, packed.data() + at, sizeof length);
    at += sizeof length;
    if (packed.size() - at < length) return Status::internal("rank 0 sent a short answer");
    const auto* begin = packed.data() + at;
    blob.assign(begin, begin + length);
    at += length;
  }
  return all;
}

void Control::loop() {
  TimePoint next_beat = Clock::now();
  TimePoint stop_by = TimePoint::max();
  std::vector<pollfd> fds;
  while (!idle_or_late(stop_by)) {
    if (Clock::now() >= next_beat) {
      beat();
      bury_silent();
      next_beat = Clock::now() + kBeatEvery;
    }
    fds.assign(1, {.fd = bell_.get(), .events = POLLIN, .revents = 0});
    {
      const std::scoped_lock lock(mutex_);
      if (stop_ && stop_by == TimePoint::max()) {
        const bool network = std::any_of(links_.begin(), links_.end(),
                                         [](const Link& l) { return l.fd.open() && l.network; });
        stop_by = Clock::now() + (network ? Duration(kNetworkFarewell) : Duration(kFarewell));
      }
      for (const Link& l : links_) {
        const int events = POLLIN | (l.out.empty() ? 0 : POLLOUT);
        fds.push_back({.fd = l.fd.get(), .events = static_cast<short>(events), .revents = 0});
      }
    }
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(Deadline(next_beat).left()).count();
    poll(fds.data(), fds.size(), static_cast<int>(left));
    if (fds[0].revents != 0) {
      uint64_t rings = 0;
      if (read(bell_.get(), &rings, sizeof rings) < 0) rings = 0;
    }
    for (int peer = 0; peer < size_; ++peer) {
      const short events = fds[static_cast<size_t>(peer) + 1].revents;
      if ((events & POLLOUT) != 0) write_to(peer);
      if ((events & (POLLIN | POLLHUP | POLLERR)) != 0) read_from(peer);
    }
    deliver_backlog();
  }
}

// Is it time to leave: asked to stop, and nothing left to send or no time left for it?
//
// A TCP socket that is closed with bytes on their way resets the connection as soon as a heartbeat
// of the other side arrives, and what the line had lost of the last words is lost for good. So
// between hosts only the sending side is closed, and the other side's answer is its own close.
bool Control::idle_or_late(TimePoint stop_by) {
  const std::scoped_lock lock(mutex_);
  if (!stop_) return false;
  const TimePoint now = Clock::now();
  bool idle = true;
  for (int peer = 0; peer < size_; ++peer) {
    Link& l = link(peer);
    if (!l.fd.open()) continue;
    if (l.network && l.out.empty() && !l.ended) {
      l.ended = true;
      shutdown(l.fd.get(), SHUT_WR);
    }
    const bool lost = l.network && now - state(peer).life.load() > kNetworkFarewell;
    idle = idle && (lost || (l.out.empty() && !l.network));
  }
  return idle || now >= stop_by;
}

void Control::beat() {
  std::vector<uint32_t> ages;
  if (rank_ == 0) {
    const TimePoint now = Clock::now();
    state(0).life = now;
    for (const State& s : states_) {
      const Duration age = std::max(now - s.life.load(), Duration::zero());
      ages.push_back(static_cast<uint32_t>(
          std::chrono::duration_cast<std::chrono::milliseconds>(age).count()));
    }
  }
  for (int peer = 0; peer < size_; ++peer) {
    if (!link(peer).fd.open()) continue;
    {
      // A peer that reads nothing gets no pile of old beats.
      const std::scoped_lock lock(mutex_);
      if (!link(peer).out.empty()) continue;
    }
    queue(peer, kBeat, bytes_of(ages.data(), ages.size()));
  }
  const std::scoped_lock lock(handler_mutex_);
  if (beat_handler_) beat_handler_();
}

// A process that was itself stopped finds old stamps when it goes on: the time before does not
// count.
void Control::bury_silent() {
  const TimePoint now = Clock::now();
  if (now - last_beat_ > kStopped) awake_since_ = now;
  last_beat_ = now;
  const Duration most = most_silence_;
  for (int peer = 0; peer < size_; ++peer) {
    const TimePoint heard = std::max(state(peer).life.load(), awake_since_);
    if (link(peer).fd.open() && now - heard > most) bury(peer);
  }
}

void Control::write_to(int peer) {
  Link& l = link(peer);
  bool broken = false;
  {
    const std::scoped_lock lock(mutex_);
    while (!l.out.empty()) {
      const Bytes& front = l.out.front();
      const ssize_t n = ::send(l.fd.get(), front.data() + l.out_sent, front.size() - l.out_sent,
                               MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n < 0) {
        broken = errno != EAGAIN && errno != EINTR;
        break;
      }
      l.out_sent += static_cast<size_t>(n);
      if (l.out_sent < front.size()) continue;
      l.out_queued -= front.size();
      l.out_sent = 0;
      l.out.pop_front();
    }
    broken = broken || l.out_queued > kMostQueued;
  }
  if (!broken) return;
  read_from(peer);  // what it said before it left
  bury(peer);
}

void Control::read_from(int peer) {
  Link& l = link(peer);
  while (l.fd.open()) {
    const ssize_t n = recv(l.fd.get(), buffer_.data(), buffer_.size(), MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) {
      bury(peer);
      return;
    }
    state(peer).life = Clock::now();
    l.in.push(std::span(buffer_).first(static_cast<size_t>(n)));
    parse(peer);
  }
}

void Control::parse(int peer) {
  Link& l = link(peer);
  Frame frame;
  while (l.in.next(frame)) {
    if (!handle(peer, std::move(frame))) {
      bury(peer);
      return;
    }
  }
  if (l.in.broken()) bury(peer);
}

bool Control::handle(int from, Frame frame) {
  if (frame.type < kFirstReserved) {
    const std::scoped_lock lock(handler_mutex_);
    backlog_.push_back({.from = from, .frame = std::move(frame)});
    return true;
  }
  switch (frame.type) {
    case kBeat:
      handle_beat(from, frame.payload);
      return true;
    case kDeath: {
      uint32_t rank = 0;
      if (frame.payload.size() != sizeof rank) return false;
      std::memcpy(&rank, frame.payload.data(), sizeof rank);
      if (rank >= static_cast<uint32_t>(size_)) return false;
      if (static_cast<int>(rank) != rank_) bury(static_cast<int>(rank));
      return true;
    }
    case kGather:
    case kGathered: {
      const std::scoped_lock lock(mutex_);
      gathered_[static_cast<size_t>(from)].push_back(std::move(frame.payload));
      changed_.notify_all();
      return true;
    }
    default:
      return false;
  }
}

void Control::handle_beat(int from, const Bytes& payload) {
  if (from != 0 || payload.size() != static_cast<size_t>(size_) * sizeof(uint32_t)) return;
  for (int r = 1; r < size_; ++r) {
    uint32_t age = 0;
    std::memcpy(&age, payload.data() + static_cast<size_t>(r) * sizeof age, sizeof age);
    const TimePoint life = Clock::now() - std::chrono::milliseconds(age);
    if (life > state(r).life.load()) state(r).life = life;
  }
}

// Marks a rank as dead, once, and passes the news on.
void Control::bury(int peer) {
  {
    const std::scoped_lock lock(mutex_);
    Link& l = link(peer);
    l.fd.reset();
    l.out.clear();
    l.out_queued = 0;
    if (state(peer).dead.exchange(true)) return;
    changed_.notify_all();
  }
  if (rank_ == 0) {
    const auto name = static_cast<uint32_t>(peer);
    for (int r = 1; r < size_; ++r) {
      if (r != peer && link(r).fd.open()) queue(r, kDeath, bytes_of(&name, 1));
    }
  }
  const std::scoped_lock lock(handler_mutex_);
  unreported_deaths_.push_back(peer);
}

void Control::deliver_backlog() {
  const std::scoped_lock lock(handler_mutex_);
  while (frame_handler_ && !backlog_.empty()) {
    auto [from, frame] = std::move(backlog_.front());
    backlog_.pop_front();
    frame_handler_(from, frame.type, std::move(frame.payload));
  }
  if (!death_handler_) return;
  for (const int rank : unreported_deaths_) death_handler_(rank);
  unreported_deaths_.clear();
}

}  // namespace sortie::exchange
