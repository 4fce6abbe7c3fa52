#include "exchange/launcher.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <span>
#include <string_view>
#include <thread>

#include "base/check.h"
#include "base/log.h"
#include "exchange/exchange.h"
#include "exchange/launch/rendezvous.h"

namespace sortie::exchange {
namespace {

constexpr const char* kChildOption = "--ep-child";
constexpr auto kGrace = std::chrono::seconds(2);

bool parse_child(std::string_view text, ChildArgs& out) {
  for (int* field : {&out.rank, &out.size, &out.control_fd}) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *field);
    if (error != std::errc()) return false;
    text.remove_prefix(static_cast<size_t>(end - text.data()));
    if (!text.empty() && text.front() == ':') text.remove_prefix(1);
  }
  return text.empty() && out.rank > 0 && out.rank < out.size && out.size <= kMaxRanks &&
         (out.control_fd > 2 || out.control_fd == -1);
}

std::string text_of(const Bytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "::1";
}

// A child's exec keeps what spawn ignored; a process started by other means needs it here.
void ignore_terminal() {
  signal(SIGINT, SIG_IGN);
  signal(SIGTERM, SIG_IGN);
}

}  // namespace

std::optional<ChildArgs> take_child_args(int& argc, char** argv) {
  ChildArgs args;
  if (argc < 3 || std::strcmp(argv[1], kChildOption) != 0 || !parse_child(argv[2], args)) {
    return std::nullopt;
  }
  for (int i = 3; i <= argc; ++i) argv[i - 2] = argv[i];  // with the null at the end
  argc -= 2;
  return args;
}

Status ProcessGroup::spawn(int argc, char** argv, int rank, int size, UniqueFd* ours) {
  UniqueFd theirs;
  if (ours != nullptr) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) {
      return Status::exhausted(
          fmt::format("cannot start rank {}: socketpair: {}", rank, strerror(errno)));
    }
    *ours = UniqueFd(pair[0]);
    theirs = UniqueFd(pair[1]);
  }
  const std::string place = fmt::format("{}:{}:{}", rank, size, theirs.get());
  std::vector<char*> args = {argv[0], const_cast<char*>(kChildOption),
                             const_cast<char*>(place.c_str())};
  args.insert(args.end(), argv + 1, argv + argc);
  args.push_back(nullptr);

  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) {
    return Status::exhausted(fmt::format("cannot start rank {}: fork: {}", rank, strerror(errno)));
  }
  if (pid == 0) {  // only async-signal-safe calls from here to exec
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);  // it ended before the line above
    signal(SIGINT, SIG_IGN);
    signal(SIGTERM, SIG_IGN);
    if (theirs.open()) fcntl(theirs.get(), F_SETFD, 0);
    execv("/proc/self/exe", args.data());
    _exit(127);
  }
  const std::scoped_lock lock(mutex_);
  children_[static_cast<size_t>(rank)].pid = pid;
  return Status::ok();
}

namespace {

// What a process that joins from elsewhere says of itself.
Member describe(const LaunchPlan& plan, int rank, const StartOptions& options) {
  char host[256] = {};
  gethostname(host, sizeof host - 1);
  return {.rank = static_cast<uint32_t>(rank),
          .size = static_cast<uint32_t>(plan.size),
          .here = static_cast<uint32_t>(plan.here),
          .nodes = static_cast<uint32_t>(plan.nodes),
          .job = plan.job,
          .host = host,
          .settings = options.settings};
}

Result<ClusterKey> key_of(const LaunchPlan& plan, const StartOptions& options) {
  if (!options.cluster_key_file.empty()) return read_cluster_key(options.cluster_key_file);
  if (plan.one_host()) return host_cluster_key();
  return ClusterKey{};
}

}  // namespace

// Links this rank with those that no process of its node started.
Status ProcessGroup::meet(const LaunchPlan& plan, int rank, const StartOptions& options,
                          std::vector<UniqueFd>& links) {
  Meeting meeting{.host = plan.host,
                  .port = plan.port,
                  .timeout = options.dist_timeout,
                  .insecure = options.insecure,
                  .me = describe(plan, rank, options)};
  ASSIGN_OR_RETURN(meeting.key, key_of(plan, options));
  if (rank == 0) {
    ASSIGN_OR_RETURN(std::vector<UniqueFd> guests, hold_meeting(meeting, plan.here));
    for (size_t r = static_cast<size_t>(plan.here); r < links.size(); ++r) {
      links[r] = std::move(guests[r]);
    }
    for (size_t r = static_cast<size_t>(plan.here); r < links.size(); ++r) {
      // Guests of this host may have come over the loopback device.
      if (address_.empty() || is_loopback(address_)) address_ = local_address(links[r]);
    }
  } else {
    ASSIGN_OR_RETURN(links[0], join_meeting(meeting));
    address_ = local_address(links[0]);
  }
  return Status::ok();
}

Result<std::unique_ptr<ProcessGroup>> ProcessGroup::open(const LaunchPlan& plan,
                                                         const std::optional<ChildArgs>& child,
                                                         int argc, char** argv,
                                                         const StartOptions& options) {
  CHECK(plan.size >= 1 && plan.size <= kMaxRanks, "size of the group");
  if (child && child->control_fd >= 0) {
    return join(*child, options.dist_timeout);
  }
  const TimePoint began = Clock::now();
  const int rank = child ? child->rank : plan.rank;
  std::unique_ptr<ProcessGroup> group(new ProcessGroup);
  group->children_.resize(static_cast<size_t>(plan.size));
  std::vector<UniqueFd> links(rank == 0 ? static_cast<size_t>(plan.size) : 1);
  if (child) {
    ignore_terminal();
  } else {
    for (int r = rank + 1; r < rank + plan.here; ++r) {
      UniqueFd* ours = rank == 0 ? &links[static_cast<size_t>(r)] : nullptr;
      RETURN_IF_ERROR(group->spawn(argc, argv, r, plan.size, ours));
    }
  }
  if (plan.meets()) RETURN_IF_ERROR(group->meet(plan, rank, options, links));
  group->control_ = std::make_shared<Control>(rank, plan.size, std::move(links));
  group->control_->on_death([g = group.get()](int dead) { g->report_death(dead); });
  // A meeting has used up its time, but whoever was welcomed is there.
  const Duration left = Deadline(began + options.dist_timeout).left();
  auto joined = group->control_->all_gather(
      std::as_bytes(std::span<const char>(group->address_)),
      plan.meets() ? std::max<Duration>(left, seconds(2)) : options.dist_timeout);
  if (!joined) return joined.status();
  // Over the loopback device a rank has met a rank 0 of its own host.
  if (is_loopback(group->address_)) group->address_ = text_of((*joined)[0]);
  return group;
}

Result<std::unique_ptr<ProcessGroup>> ProcessGroup::start(int argc, char** argv, int size,
                                                          Duration dist_timeout) {
  return open({.size = size, .here = size}, std::nullopt, argc, argv,
              {.dist_timeout = dist_timeout});
}

Result<std::unique_ptr<ProcessGroup>> ProcessGroup::join(const ChildArgs& args,
                                                         Duration dist_timeout) {
  ignore_terminal();
  fcntl(args.control_fd, F_SETFD, FD_CLOEXEC);
  std::unique_ptr<ProcessGroup> group(new ProcessGroup);
  std::vector<UniqueFd> links;
  links.emplace_back(args.control_fd);
  group->control_ = std::make_shared<Control>(args.rank, args.size, std::move(links));
  auto joined = group->control_->all_gather({}, dist_timeout);
  if (!joined) return joined.status();
  group->address_ = text_of((*joined)[0]);  // rank 0's, which is on this host
  return group;
}

ProcessGroup::~ProcessGroup() {
  // Children of a group that never came to be have nothing to finish.
  const Duration grace = control_ ? Duration(kGrace) : Duration::zero();
  if (control_) control_->on_death(nullptr);
  control_.reset();  // the children see their sockets close
  if (const Status s = close(grace); !s.is_ok()) spdlog::debug("{}", s.message());
}

pid_t ProcessGroup::pid(int rank) const {
  return children_.empty() ? 0 : children_[static_cast<size_t>(rank)].pid;
}

// True once the child has ended. Under mutex_.
bool ProcessGroup::reap(int rank, bool block) {
  Child& child = children_[static_cast<size_t>(rank)];
  if (child.pid == 0 || child.reaped) return true;
  pid_t got = 0;
  do {
    got = waitpid(child.pid, &child.wait_status, block ? 0 : WNOHANG);
  } while (got < 0 && errno == EINTR);
  child.reaped = got != 0;
  return child.reaped;
}

std::string ProcessGroup::how_ended(int rank) {
  const Child& child = children_[static_cast<size_t>(rank)];
  if (WIFSIGNALED(child.wait_status)) {
    const int number = WTERMSIG(child.wait_status);
    return fmt::format("rank {} (process {}) was ended by signal {} ({})", rank, child.pid, number,
                       strsignal(number));
  }
  return fmt::format("rank {} (process {}) ended with exit code {}", rank, child.pid,
                     WEXITSTATUS(child.wait_status));
}

void ProcessGroup::report_death(int rank) {
  // The socket closes a moment before the process can be waited for.
  for (int tries = 0; tries < 50; ++tries) {
    {
      const std::scoped_lock lock(mutex_);
      if (reap(rank, false)) {
        if (children_[static_cast<size_t>(rank)].wait_status != 0) {
          spdlog::warn("{}", how_ended(rank));
        }
        return;
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

Status ProcessGroup::close(Duration grace, uint64_t lost) {
  const Deadline deadline(grace);
  Status first;
  for (int r = 1; r < static_cast<int>(children_.size()); ++r) {
    while (true) {
      {
        const std::scoped_lock lock(mutex_);
        if (reap(r, false)) break;
        if (deadline.passed() || (lost >> r & 1) != 0) {
          kill(children_[static_cast<size_t>(r)].pid, SIGKILL);
          reap(r, true);
          break;
        }
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    const std::scoped_lock lock(mutex_);
    const Child& child = children_[static_cast<size_t>(r)];
    if (child.pid != 0 && child.wait_status != 0 && first.is_ok() && (lost >> r & 1) == 0) {
      first = Status::rank_lost(how_ended(r));
    }
  }
  return first;
}

}  // namespace sortie::exchange
