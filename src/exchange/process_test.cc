// Ranks as processes. This program is also the ranks that it tests: ProcessGroup::start executes it
// again, and its main runs the role named on the command line instead of the tests.
#include <dirent.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "base/log.h"
#include "exchange/conformance.h"
#include "exchange/launcher.h"
#if SORTIE_HAS_UCX
#include "exchange/ucx.h"
#endif

namespace sortie::exchange {
namespace {

using Args = std::vector<std::string>;

bool contains(const std::string& s, const std::string& part) {
  return s.find(part) != std::string::npos;
}

Result<std::unique_ptr<ProcessGroup>> start(int size, Args args, double dist_timeout = 20) {
  args.insert(args.begin(), "exchange_test");
  std::vector<char*> argv;
  for (std::string& a : args) argv.push_back(a.data());
  argv.push_back(nullptr);
  return ProcessGroup::start(static_cast<int>(args.size()), argv.data(), size,
                             seconds(dist_timeout));
}

// ---- Roles: what every rank of a group runs, and what is wrong if not "".

std::string role_idle(ProcessGroup& group, const Args&) {
  while (group.rank() != 0 && !group.control().dead(0)) usleep(1000);
  return "";
}

std::string role_exit(ProcessGroup& group, const Args& args) {
  if (group.rank() == 1) std::exit(std::stoi(args[1]));
  return "";
}

#if SORTIE_HAS_UCX

std::string sockets_on_the_network() {
  std::set<std::string> inodes;
  for (const char* table : {"tcp", "tcp6", "udp", "udp6"}) {
    std::ifstream in(fmt::format("/proc/self/net/{}", table));
    std::string line;
    std::getline(in, line);
    while (std::getline(in, line)) {
      std::istringstream fields(line);
      std::string field;
      for (int i = 0; i < 10; ++i) fields >> field;
      inodes.insert("socket:[" + field + "]");
    }
  }
  DIR* dir = opendir("/proc/self/fd");
  std::string found;
  while (const dirent* entry = readdir(dir)) {
    char target[256] = {};
    const std::string path = fmt::format("/proc/self/fd/{}", entry->d_name);
    if (readlink(path.c_str(), target, sizeof target - 1) < 0) continue;
    if (inodes.count(target) != 0) found = path;
  }
  closedir(dir);
  return found.empty() ? "" : "a network socket is open: " + found;
}

Result<std::shared_ptr<Transport>> connect(ProcessGroup& group, const Options& options,
                                           const std::string& memory = "sysv") {
  const bool tcp = memory == "tcp";
  return make_ucx_transport(group.shared_control(),
                            {.window_bytes = options.window_bytes(group.size()),
                             .dist_timeout = seconds(20),
                             .memories = {tcp ? "sysv" : memory},
                             .network_address = tcp ? "127.0.0.1" : "",
                             .force_network = tcp});
}

// conform MODE SEED STEPS MEMORY
std::string role_conform(ProcessGroup& group, const Args& args) {
  const Options o = conformance_options(group.size(), static_cast<Mode>(std::stoi(args[1])));
  auto transport = connect(group, o, args[4]);
  if (!transport) return transport.status().message();
  for (int peer = 0; peer < group.size(); ++peer) {
    const std::string lane = (*transport)->lane(peer);
    const std::string want = args[4] + (args[4] == "tcp" ? "/lo" : "/memory");
    if (peer != group.rank() && lane != want) return "lane " + lane;
  }
  const std::string open_socket = sockets_on_the_network();
  if (open_socket.empty() != (args[4] != "tcp")) return "network sockets: " + open_socket;
  const auto exchange = make_exchange(*transport, o);
  return conform(*exchange, std::stoull(args[2]), std::stoi(args[3]));
}

Status one_dispatch(Exchange& e, int layer) {
  const std::vector<std::byte> row(100);
  const std::vector<int32_t> ids = {0, e.options().experts - 1, -1, -1};
  const std::vector<float> weights(4, 1.0F);
  auto r = e.dispatch({.layer = layer,
                       .rows = row.data(),
                       .row_bytes = 100,
                       .tokens = 1,
                       .ids = ids.data(),
                       .weights = weights.data()});
  return r ? Status::ok() : r.status();
}
Status one_combine(Exchange& e, int layer) {
  auto r = e.combine(layer, e.parts_buffer());
  return r ? Status::ok() : r.status();
}

// lose WHEN HOW TEXT: rank 1 fails at WHEN; each survivor's error must contain TEXT.
std::string role_lose(ProcessGroup& group, const Args& args) {
  Options o = conformance_options(group.size(), Mode::kLowLatency);
  o.poison = false;
  o.exchange_timeout = seconds(0.6);
  o.step_timeout = seconds(args[2] == "stuck" ? 0.6 : 20);
  auto transport = connect(group, o);
  if (!transport) return transport.status().message();
  const auto e = make_exchange(*transport, o);
  const auto fail = [&](const std::string& now) {
    if (group.rank() != 1 || now != args[1]) return;
    if (args[2] == "kill") raise(SIGKILL);
    if (args[2] == "stop") raise(SIGSTOP);
    if (args[2] == "stuck") sleep(30);
    if (args[2] == "slow") usleep(1'500'000);
  };
  Status got = one_dispatch(*e, 0);
  if (got) got = one_combine(*e, 0);
  fail("dispatch");
  if (got) got = one_dispatch(*e, 1);
  fail("combine");
  if (got) got = one_combine(*e, 1);
  fail("between");
  const TimePoint began = Clock::now();
  if (got) {
    if (auto headers = e->all_gather({}); !headers) got = headers.status();
  }
  if (args[3] == "-") return got.message();
  if (to_seconds(Clock::now() - began) > 3) return "too late";
  return contains(got.message(), args[3]) ? "" : "instead: " + got.message();
}

// degrade WHEN HOW: rank 1 fails; the others agree, go on, and compute what the definition says.
// The group's own check is conform(); the fenced rank's is its sentence.
std::string role_degrade(ProcessGroup& group, const Args& args) {
  Options o = conformance_options(group.size(), Mode::kAuto);
  o.exchange_timeout = seconds(0.6);
  o.step_timeout = seconds(20);
  o.on_loss = OnLoss::kDegrade;
  auto transport = connect(group, o);
  if (!transport) return transport.status().message();
  const auto e = make_exchange(*transport, o);
  if (std::string s = conform(*e, 5, 20); !s.empty()) return s;
  const auto fail = [&](const std::string& now) {
    if (group.rank() != 1 || now != args[1]) return;
    raise(args[2] == "kill" ? SIGKILL : SIGSTOP);
  };
  Status got = one_dispatch(*e, 0);
  if (got) got = one_combine(*e, 0);
  fail("dispatch");
  if (got) got = one_dispatch(*e, 1);
  fail("combine");
  if (got) got = one_combine(*e, 1);
  fail("between");
  if (got) {
    if (auto headers = e->all_gather({}); !headers) got = headers.status();
  }
  const Result<Recovery> r = e->recover(got);
  if (group.rank() == 1) {
    return contains(r.status().message(), "rank 1 is out of the group and ends")
               ? "fenced"
               : "not fenced: " + r.status().message();
  }
  if (!r) return r.status().message();
  if (r->lost.size() != 1 || r->lost[0].rank != 1) return "not rank 1 alone";
  const std::string place = args[1] == "between" ? "before a step" : "in layer 1, " + args[1];
  if (!contains(r->lost[0].sentence, "rank 1 was lost " + place)) return r->lost[0].sentence;
  if (group.rank() == 0 && args[2] == "stop") kill(group.pid(1), SIGCONT);  // while they go on
  return conform(*e, 9, 200);
}

// idle-wake: the others sleep until rank 0's header wakes them.
std::string role_idle_wake(ProcessGroup& group, const Args&) {
  const Options o = conformance_options(group.size(), Mode::kAuto);
  auto transport = connect(group, o);
  if (!transport) return transport.status().message();
  const auto e = make_exchange(*transport, o);
  for (int round = 0; round < 20; ++round) {
    if (group.rank() == 0) {
      usleep(5000);
    } else {
      auto work = e->wait_for_peers(seconds(10));
      if (!work) return work.status().message();
      if (!*work) return "woken for nothing";
    }
    auto headers = e->all_gather({.decode_rows = round});
    if (!headers) return headers.status().message();
    if ((*headers)[0].decode_rows != round) return "wrong header";
  }
  return "";
}

// no-memory MEMORY BYTES TEXT
std::string role_no_memory(ProcessGroup& group, const Args& args) {
  auto t = make_ucx_transport(
      group.shared_control(),
      {.window_bytes = std::stoll(args[2]), .dist_timeout = seconds(20), .memories = {args[1]}});
  if (t) return "there was memory";
  return contains(t.status().message(), args[3]) ? "" : "instead: " + t.status().message();
}

#endif

const std::map<std::string, std::function<std::string(ProcessGroup&, const Args&)>>& roles() {
  static const std::map<std::string, std::function<std::string(ProcessGroup&, const Args&)>> all = {
    {"idle", role_idle},
    {"exit", role_exit},
#if SORTIE_HAS_UCX
    {"conform", role_conform},
    {"lose", role_lose},
    {"degrade", role_degrade},
    {"idle-wake", role_idle_wake},
    {"no-memory", role_no_memory},
#endif
  };
  return all;
}

int child_main(const ChildArgs& child, const Args& args) {
  if (args[0] == "never" && child.rank % 2 == 1) {
    sleep(30);
    return 0;
  }
  if (args[0] == "early-exit" && child.rank == 1) return 3;
  auto group = ProcessGroup::join(child, seconds(20));
  if (!group) return 4;
  const auto role = roles().find(args[0]);
  if (role == roles().end()) return 0;
  const std::string error = role->second(**group, args);
  if (!error.empty()) fmt::print(stderr, "rank {}: {}\n", child.rank, error);
  return error.empty() ? 0 : 1;
}

// ---- What is left behind

std::set<std::string> dev_shm() {
  std::set<std::string> names;
  if (DIR* dir = opendir("/dev/shm")) {
    while (const dirent* entry = readdir(dir)) {
      if (contains(entry->d_name, "ucx")) names.insert(entry->d_name);
    }
    closedir(dir);
  }
  return names;
}

// SysV segments that one of the processes made.
int segments_of(const std::vector<pid_t>& pids) {
  std::ifstream in("/proc/sysvipc/shm");
  std::string line;
  std::getline(in, line);
  int n = 0;
  while (std::getline(in, line)) {
    std::istringstream fields(line);
    std::string field;
    for (int i = 0; i < 5; ++i) fields >> field;  // key shmid perms size cpid
    n += static_cast<int>(std::count(pids.begin(), pids.end(), std::stol(field)));
  }
  return n;
}

// Runs a role on a group with the test as rank 0; every rank must be content.
struct GroupRun {
  explicit GroupRun(int size, const Args& args, double grace = 5) {
    const std::set<std::string> before = dev_shm();
    std::vector<pid_t> pids = {getpid()};
    {
      auto group = start(size, args);
      EXPECT_TRUE(group.is_ok()) << group.status().message();
      if (!group) return;
      for (int r = 1; r < size; ++r) pids.push_back((*group)->pid(r));
      EXPECT_EQ(roles().at(args[0])(**group, args), "");
      ended = (*group)->close(seconds(grace));
    }
    EXPECT_EQ(dev_shm(), before);
    EXPECT_EQ(segments_of(pids), 0);
    for (size_t i = 1; i < pids.size(); ++i) EXPECT_EQ(kill(pids[i], 0), -1);
  }
  Status ended;
};

TEST(ProcessGroup, StartsAndEndsWithItsParent) {
  std::vector<pid_t> pids;
  {
    auto group = start(4, {"idle"});
    ASSERT_TRUE(group.is_ok()) << group.status().message();
    EXPECT_EQ((*group)->size(), 4);
    for (int r = 1; r < 4; ++r) pids.push_back((*group)->pid(r));
    // A terminal's ^C reaches all of them; rank 0 decides what it means.
    for (const pid_t pid : pids) EXPECT_EQ(kill(pid, SIGINT), 0);
    usleep(20000);
    for (const pid_t pid : pids) EXPECT_EQ(kill(pid, 0), 0);
  }
  for (const pid_t pid : pids) EXPECT_EQ(kill(pid, 0), -1);
}

void expect_no_start(int size, const std::vector<std::string>& args, double dist_timeout,
                     const std::string& why) {
  const TimePoint began = Clock::now();
  const auto group = start(size, args, dist_timeout);
  ASSERT_FALSE(group.is_ok());
  EXPECT_TRUE(contains(group.status().message(), why)) << group.status().message();
  EXPECT_LT(to_seconds(Clock::now() - began), 8);
}

TEST(ProcessGroup, RanksThatNeverComeAreNamed) {
  expect_no_start(4, {"never"}, 0.5, "rank 1, 3 did not join within 0.5 s");
}

TEST(ProcessGroup, AnEarlyExitIsNamedAtOnce) {
  expect_no_start(2, {"early-exit"}, 20, "rank 1 was lost during start-up");
}

TEST(ProcessGroup, ExitCodesAndSignalsAreReported) {
  auto exits = start(2, {"exit", "3"});
  ASSERT_TRUE(exits.is_ok());
  EXPECT_TRUE(contains((*exits)->close(seconds(5)).message(), "ended with exit code 3"));
  auto killed = start(2, {"idle"});
  ASSERT_TRUE(killed.is_ok());
  kill((*killed)->pid(1), SIGKILL);
  EXPECT_TRUE(contains((*killed)->close(seconds(5)).message(), "was ended by signal 9"));
}

TEST(ProcessGroup, AKilledParentLeavesNoOrphan) {
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  int out[2];
  ASSERT_EQ(pipe(out), 0);
  const pid_t parent = fork();
  if (parent == 0) {
    dup2(out[1], STDOUT_FILENO);
    execl("/proc/self/exe", "exchange_test", "--parent-of", "4", nullptr);
    _exit(127);
  }
  close(out[1]);
  FILE* in = fdopen(out[0], "r");
  std::vector<pid_t> children(3);
  for (pid_t& pid : children) ASSERT_EQ(std::fscanf(in, "%d", &pid), 1);
  usleep(200000);
  std::vector<pid_t> all = children;
  all.push_back(parent);
#if SORTIE_HAS_UCX
  EXPECT_GE(segments_of(all), 4);  // they are at it
#endif
  kill(parent, SIGKILL);
  EXPECT_EQ(waitpid(parent, nullptr, 0), parent);
  for (const pid_t pid : children) {
    int status = 0;
    EXPECT_EQ(waitpid(pid, &status, 0), pid);  // ours now, as the subreaper
    EXPECT_TRUE(WIFSIGNALED(status) || WIFEXITED(status));
  }
  EXPECT_EQ(segments_of(all), 0);
  fclose(in);
}

TEST(ChildArgs, AreTakenOutOfTheCommandLine) {
  std::string words[] = {"sortie", "--ep-child", "2:4:9", "run", "model"};
  char* argv[6] = {};
  for (int i = 0; i < 5; ++i) argv[i] = words[i].data();
  int argc = 5;
  const auto child = take_child_args(argc, argv);
  ASSERT_TRUE(child.has_value());
  EXPECT_EQ(child->rank, 2);
  EXPECT_EQ(child->size, 4);
  EXPECT_EQ(child->control_fd, 9);
  ASSERT_EQ(argc, 3);
  EXPECT_STREQ(argv[1], "run");
  EXPECT_EQ(argv[3], nullptr);
  EXPECT_FALSE(take_child_args(argc, argv).has_value());
}

#if SORTIE_HAS_UCX

void expect_conformance(const char* seed, const char* steps, const char* memory) {
  for (const int size : {2, 4}) {
    for (const Mode mode : {Mode::kLowLatency, Mode::kNormal, Mode::kAuto}) {
      const GroupRun run(size,
                         {"conform", std::to_string(static_cast<int>(mode)), seed, steps, memory});
      EXPECT_TRUE(run.ended) << run.ended.message();
    }
  }
}

TEST(Ucx, Conformance) { expect_conformance("23", "150", "sysv"); }

// What ranks of different hosts do, over this host's loopback device.
TEST(Ucx, ConformanceOverTcp) { expect_conformance("37", "100", "tcp"); }

TEST(Ucx, ConformanceOverPosixMemory) {
  const GroupRun run(2, {"conform", "2", "29", "150", "posix"});
  EXPECT_TRUE(run.ended) << run.ended.message();
}

TEST(Ucx, ThousandsOfEpochs) {
  const GroupRun run(2, {"conform", "2", "31", "4000", "sysv"});
  EXPECT_TRUE(run.ended) << run.ended.message();
}

TEST(Ucx, IdleRanksSleepUntilThereIsWork) {
  const GroupRun run(4, {"idle-wake"});
  EXPECT_TRUE(run.ended) << run.ended.message();
}

TEST(Ucx, AKilledRankIsNamedByAllOthers) {
  for (const std::string when : {"dispatch", "combine", "between"}) {
    const std::string place = when == "between" ? "before a step" : "in layer 1, " + when;
    const GroupRun run(
        4, {"lose", when, "kill", "rank 1 was lost " + place + ": its process has ended"});
    EXPECT_TRUE(contains(run.ended.message(), "rank 1 (process ")) << run.ended.message();
    EXPECT_TRUE(contains(run.ended.message(), "was ended by signal 9"));
  }
}

TEST(Ucx, AStoppedProcessShowsNoLife) {
  const GroupRun run(
      2, {"lose", "dispatch", "stop", "rank 1 was lost in layer 1, dispatch: no sign of life for"},
      0.2);
  EXPECT_FALSE(run.ended);  // it was killed in the end
}

TEST(Ucx, SurvivorsOfAKilledRankGoOn) {
  for (const std::string when : {"dispatch", "combine", "between"}) {
    const GroupRun run(4, {"degrade", when, "kill"});
    EXPECT_TRUE(contains(run.ended.message(), "was ended by signal 9")) << run.ended.message();
  }
}

TEST(Ucx, AStoppedRankIsFencedWhenItGoesOn) {
  for (const std::string when : {"dispatch", "combine", "between"}) {
    const GroupRun run(4, {"degrade", when, "stop"});
    EXPECT_TRUE(contains(run.ended.message(), "rank 1 (process ")) << run.ended.message();
    EXPECT_TRUE(contains(run.ended.message(), "ended with exit code 1")) << run.ended.message();
  }
}

TEST(Ucx, AStuckRankIsFoundByTheStepTimeout) {
  const GroupRun run(
      2, {"lose", "combine", "stuck", "rank 1 was lost in layer 1, combine: alive, but"}, 0.2);
  EXPECT_FALSE(run.ended);
}

TEST(Ucx, ASlowRankIsNoLostRank) {
  const GroupRun run(2, {"lose", "combine", "slow", "-"});
  EXPECT_TRUE(run.ended) << run.ended.message();
}

TEST(Ucx, TooLittleSharedMemoryIsASentenceOnEveryRank) {
  // Refused before a byte is written: 2^50 bytes are more than any /dev/shm has.
  const GroupRun posix(2, {"no-memory", "posix", "1125899906842624", "/dev/shm has "});
  EXPECT_TRUE(posix.ended) << posix.ended.message();
  const GroupRun sysv(2, {"no-memory", "sysv", "1125899906842624", "of sysv shared memory"});
  EXPECT_TRUE(sysv.ended) << sysv.ended.message();
}

#endif

// Rank 0 of a group that is busy until it is killed; prints its children.
int parent_main(int size) {
#if SORTIE_HAS_UCX
  const Args args = {"conform", "2", "1", "100000000", "sysv"};
#else
  const Args args = {"idle"};
#endif
  auto group = start(size, args);
  if (!group) return 1;
  for (int r = 1; r < size; ++r) fmt::print("{}\n", (*group)->pid(r));
  std::fflush(stdout);
  roles().at(args[0])(**group, args);
  sleep(30);
  return 0;
}

}  // namespace
}  // namespace sortie::exchange

int main(int argc, char** argv) {
  using namespace sortie::exchange;
  sortie::init_log("error");
  if (const auto child = take_child_args(argc, argv)) {
    return child_main(*child, Args(argv + 1, argv + argc));
  }
  if (argc == 3 && std::string(argv[1]) == "--parent-of") return parent_main(std::stoi(argv[2]));
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
