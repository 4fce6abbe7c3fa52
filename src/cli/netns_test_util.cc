#include "cli/netns_test_util.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <random>
#include <sstream>
#include <vector>

namespace sortie::cli {

namespace {

constexpr const char* kDevice = "line0";
constexpr size_t kMostPacket = 65536;
constexpr size_t kMostQueued = 20000;  // packets on their way, each way; more are dropped

std::string refused(const char* what) { return fmt::format("{}: {}", what, strerror(errno)); }

sockaddr ipv4(const std::string& text) {
  sockaddr_in a{};
  a.sin_family = AF_INET;
  inet_pton(AF_INET, text.c_str(), &a.sin_addr);
  sockaddr out{};
  std::memcpy(&out, &a, sizeof out);
  return out;
}

// Brings a device up; with an address unless that is empty.
std::string bring_up(const char* device, const std::string& address) {
  const int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  ifreq request{};
  std::strncpy(request.ifr_name, device, IFNAMSIZ - 1);
  std::string error;
  if (!address.empty()) {
    request.ifr_addr = ipv4(address);
    if (ioctl(fd, SIOCSIFADDR, &request) != 0) error = refused("set the address of the device");
    request.ifr_netmask = ipv4("255.255.255.0");
    if (error.empty() && ioctl(fd, SIOCSIFNETMASK, &request) != 0)
      error = refused("set the netmask");
  }
  if (error.empty() && ioctl(fd, SIOCGIFFLAGS, &request) != 0) error = refused("see the device");
  request.ifr_flags |= IFF_UP | IFF_RUNNING;
  if (error.empty() && ioctl(fd, SIOCSIFFLAGS, &request) != 0) error = refused("bring a device up");
  close(fd);
  return error;
}

// In the keeper: becomes the host. "" or what was refused.
std::string become_host(int number, int& tun) {
  if (unshare(CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWNS) != 0) {
    return refused("make namespaces");
  }
  // UCX looks for devices in /sys, which shows those of the namespace that mounted it.
  if (mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      mount("sysfs", "/sys", "sysfs", 0, nullptr) != 0) {
    return refused("mount /sys of a network namespace");
  }
  // Debian's way: a host's own name is 127.0.1.1 to itself.
  char hosts[] = "/tmp/sortie_hosts_XXXXXX";
  const int fd = mkstemp(hosts);
  const std::string names =
      fmt::format("127.0.0.1 localhost\n{} host0\n{} host1\n",
                  number == 0 ? "127.0.1.1" : "10.77.0.1", number == 1 ? "127.0.1.1" : "10.77.0.2");
  const bool written = write(fd, names.data(), names.size()) == static_cast<ssize_t>(names.size());
  const bool bound = mount(hosts, "/etc/hosts", nullptr, MS_BIND, nullptr) == 0;
  unlink(hosts);
  close(fd);
  if (!written || !bound) return refused("give the hosts names");
  const std::string name = fmt::format("host{}", number);
  if (sethostname(name.c_str(), name.size()) != 0) return refused("name the host");
  tun = open("/dev/net/tun", O_RDWR | O_CLOEXEC | O_NONBLOCK);
  if (tun < 0) return refused("open /dev/net/tun");
  ifreq request{};
  std::strncpy(request.ifr_name, kDevice, IFNAMSIZ - 1);
  request.ifr_flags = IFF_TUN | IFF_NO_PI;
  if (ioctl(tun, TUNSETIFF, &request) != 0) return refused("make a TUN device");
  std::string error = bring_up("lo", "");
  return error.empty() ? bring_up(kDevice, fmt::format("10.77.0.{}", number + 1)) : error;
}

// One word with or without a descriptor over a socket pair.
void send_word(int socket, const std::string& word, int fd) {
  iovec data{.iov_base = const_cast<char*>(word.data()), .iov_len = word.size()};
  alignas(cmsghdr) char space[CMSG_SPACE(sizeof fd)] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = space;
    message.msg_controllen = sizeof space;
    cmsghdr* c = CMSG_FIRSTHDR(&message);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof fd);
    std::memcpy(CMSG_DATA(c), &fd, sizeof fd);
  }
  (void)sendmsg(socket, &message, MSG_NOSIGNAL);
}

std::string receive_word(int socket, int& fd) {
  char text[256];
  iovec data{.iov_base = text, .iov_len = sizeof text};
  alignas(cmsghdr) char space[CMSG_SPACE(sizeof fd)] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = space;
  message.msg_controllen = sizeof space;
  const ssize_t n = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  fd = -1;
  if (const cmsghdr* c = n > 0 ? CMSG_FIRSTHDR(&message) : nullptr; c != nullptr) {
    std::memcpy(&fd, CMSG_DATA(c), sizeof fd);
  }
  return n > 0 ? std::string(text, static_cast<size_t>(n)) : "the host's process ended";
}

int count_lines(const std::string& path, const std::function<bool(const std::string&)>& wanted) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);  // the heading
  int n = 0;
  while (std::getline(file, line)) n += wanted(line) ? 1 : 0;
  return n;
}

// Answers questions of the test from within the host until the test goes away.
[[noreturn]] void keep(int socket) {
  char what = 0;
  while (recv(socket, &what, 1, 0) == 1) {
    int n = 0;
    if (what == 't') {
      for (const char* table : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
        n += count_lines(table, [](const std::string& line) {
          std::istringstream columns(line);
          std::string column;
          for (int i = 0; i < 10; ++i)
            columns >> column;  // the tenth is the inode, 0 without owner
          return column != "0";
        });
      }
    } else {
      n = count_lines("/proc/sysvipc/shm", [](const std::string&) { return true; });
    }
    const std::string answer = std::to_string(n);
    (void)send(socket, answer.data(), answer.size(), MSG_NOSIGNAL);
  }
  _exit(0);
}

}  // namespace

Result<std::unique_ptr<NamespaceHost>> NamespaceHost::make(int number) {
  std::unique_ptr<NamespaceHost> host(new NamespaceHost);
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) {
    return Status::exhausted(refused("socketpair"));
  }
  host->socket_ = pair[0];
  host->keeper_ = fork();
  if (host->keeper_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(pair[0]);
    int tun = -1;
    const std::string error = become_host(number, tun);
    send_word(pair[1], error.empty() ? "ready" : error, tun);
    if (!error.empty()) _exit(1);
    close(tun);
    keep(pair[1]);
  }
  close(pair[1]);
  const std::string word = receive_word(host->socket_, host->tun_);
  if (word != "ready") return Status::invalid("this system refuses to " + word);
  size_t i = 0;
  for (const char* name : {"net", "ipc", "uts", "mnt"}) {
    const std::string path = fmt::format("/proc/{}/ns/{}", host->keeper_, name);
    host->namespaces_[i] = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (host->namespaces_[i++] < 0) return Status::invalid(refused("open a namespace"));
  }
  return host;
}

NamespaceHost::~NamespaceHost() {
  for (const int fd : namespaces_) {
    if (fd >= 0) close(fd);
  }
  if (tun_ >= 0) close(tun_);
  if (socket_ >= 0) close(socket_);
  if (keeper_ > 0) {
    kill(keeper_, SIGKILL);
    waitpid(keeper_, nullptr, 0);
  }
}

bool NamespaceHost::enter() const {
  for (const int fd : namespaces_) {
    if (setns(fd, 0) != 0) return false;
  }
  return true;
}

int NamespaceHost::read_count(char what) const {
  if (send(socket_, &what, 1, MSG_NOSIGNAL) != 1) return -1;
  int fd = -1;
  return std::stoi(receive_word(socket_, fd));
}
int NamespaceHost::sockets() const { return read_count('t'); }
int NamespaceHost::segments() const { return read_count('m'); }

Line::Line(const NamespaceHost& a, const NamespaceHost& b, LineQuality quality)
    : tun_{a.tun(), b.tun()},
      quality_(quality),
      bell_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      thread_([this] { loop(); }) {}

Line::~Line() {
  stop_ = true;
  const uint64_t one = 1;
  if (write(bell_, &one, sizeof one) < 0) stop_ = true;
  thread_.join();
  close(bell_);
}

void Line::loop() {
  struct Packet {
    TimePoint due;
    std::vector<char> bytes;
  };
  std::array<std::deque<Packet>, 2> on_the_way;  // from host i to the other; in order, equal delays
  std::mt19937 random(1);
  std::bernoulli_distribution is_lost(quality_.loss);
  std::vector<char> buffer(kMostPacket);
  while (!stop_) {
    TimePoint next = Clock::now() + std::chrono::milliseconds(100);
    for (const auto& queue : on_the_way) {
      if (!queue.empty()) next = std::min(next, queue.front().due);
    }
    const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(Deadline(next).left());
    const timespec wait{.tv_sec = ns.count() / 1'000'000'000,
                        .tv_nsec = ns.count() % 1'000'000'000};
    pollfd fds[] = {{.fd = tun_[0], .events = POLLIN, .revents = 0},
                    {.fd = tun_[1], .events = POLLIN, .revents = 0},
                    {.fd = bell_, .events = POLLIN, .revents = 0}};
    ppoll(fds, 3, &wait, nullptr);
    for (size_t from = 0; from < 2; ++from) {
      ssize_t n = 0;
      while ((n = read(tun_[from], buffer.data(), buffer.size())) > 0) {
        if (cut_ || is_lost(random) || on_the_way[from].size() >= kMostQueued) {
          ++lost_;
          continue;
        }
        on_the_way[from].push_back(
            {Clock::now() + quality_.delay, {buffer.begin(), buffer.begin() + n}});
      }
      auto& queue = on_the_way[from];
      while (!queue.empty() && queue.front().due <= Clock::now()) {
        const auto& bytes = queue.front().bytes;
        // What was under way when the line was cut is gone too.
        if (!cut_ && write(tun_[1 - from], bytes.data(), bytes.size()) > 0) ++forwarded_;
        queue.pop_front();
      }
    }
  }
}

}  // namespace sortie::cli
