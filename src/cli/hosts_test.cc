// The program over several hosts: two namespaces of this one, joined by a line that loses 1 % of
// the packets and delays each by 20 ms, each way. CI takes a short form; SORTIE_SOAK=1 the long
// one.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

#include "cli/netns_test_util.h"
#include "cli/process_test_util.h"

namespace sortie::cli {
namespace {

#if SORTIE_HAS_UCX

namespace fs = std::filesystem;

const bool kSoak = std::getenv("SORTIE_SOAK") != nullptr;
const std::string kMini = SORTIE_SOURCE_DIR "/models/mini";
const std::vector<std::string> kPrompt = {
    "run",     kMini,         "-p", "Question: A recipe for 14 muffins needs 6 eggs.",
    "--quiet", "--ignore-eos"};
constexpr LineQuality kBadLine = {.loss = 0.01, .delay = std::chrono::milliseconds(20)};

std::vector<std::string> operator+(std::vector<std::string> a, const std::vector<std::string>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

std::string alone(const std::string& tokens) {
  const Finished f = run_sortie(kPrompt + std::vector<std::string>{"--max-new-tokens", tokens});
  EXPECT_EQ(f.code, 0) << f.err;
  return f.out;
}

std::set<std::string> shared_memory() {
  std::set<std::string> names;
  for (const auto& f : fs::directory_iterator("/dev/shm")) {
    if (f.path().filename().string().find("ucx") != std::string::npos) names.insert(f.path());
  }
  return names;
}

// Two hosts and a line, and a key that both have.
class Hosts : public testing::Test {
 protected:
  void SetUp() override {
    if (std::getenv("SORTIE_TEST_SHORT") != nullptr) {
      GTEST_SKIP() << "SORTIE_TEST_SHORT: two hosts are left to the release build";
    }
    for (int i = 0; i < 2; ++i) {
      auto host = NamespaceHost::make(i);
      if (!host) GTEST_SKIP() << host.status().message();
      hosts_[i] = std::move(*host);
    }
    std::ofstream(folder_ / "key") << "a secret of the two hosts\n";
    chmod((folder_ / "key").c_str(), 0600);
  }

  std::vector<std::string> group(int node, const std::vector<std::string>& more) const {
    return kPrompt + std::vector<std::string>{"--ep-size",          "4",
                                              "--nnodes",           "2",
                                              "--node-rank",        std::to_string(node),
                                              "--dist-init-addr",   "10.77.0.1:5000",
                                              "--cluster-key-file", folder_ / "key",
                                              "--dist-timeout",     "20"} +
           more;
  }
  std::unique_ptr<SortieProcess> start(int host, const std::vector<std::string>& arguments) const {
    return std::make_unique<SortieProcess>(arguments, std::vector<std::string>{},
                                           [this, host] { return hosts_[host]->enter(); });
  }
  // Both nodes of one group.
  std::array<std::unique_ptr<SortieProcess>, 2> start_both(
      const std::vector<std::string>& more) const {
    return {start(0, group(0, more)), start(1, group(1, more))};
  }

  // Neither processes nor sockets nor memory of these.
  void expect_nothing_left(const std::set<pid_t>& processes,
                           const std::set<std::string>& before) const {
    const Deadline deadline(seconds(8));
    const auto left = [&] {
      std::string what;
      for (const pid_t p : processes) {
        if (kill(p, 0) == 0) what += " process " + std::to_string(p);
      }
      for (const auto& host : hosts_) {
        if (host->sockets() != 0) what += " sockets";
        if (host->segments() != 0) what += " segments";
      }
      for (const std::string& name : shared_memory()) {
        if (before.count(name) == 0) what += " " + name;
      }
      return what;
    };
    while (!left().empty() && !deadline.passed()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    EXPECT_EQ(left(), "");
  }

  TemporaryFolder folder_;
  std::unique_ptr<NamespaceHost> hosts_[2];
};

std::set<pid_t> family(const std::array<std::unique_ptr<SortieProcess>, 2>& nodes) {
  std::set<pid_t> all;
  for (const auto& n : nodes) {
    all.insert(n->pid());
    for (const pid_t child : n->children()) all.insert(child);
  }
  return all;
}

TEST_F(Hosts, FourRanksOnTwoHostsGiveTheTokensOfOneProcess) {
  const std::set<std::string> before = shared_memory();
  const Line line(*hosts_[0], *hosts_[1], kBadLine);
  const std::string tokens = kSoak ? "200" : "12";
  auto nodes = start_both({"--max-new-tokens", tokens});
  const Finished other = nodes[1]->finish(seconds(kSoak ? 500 : 100));
  const Finished front = nodes[0]->finish(seconds(20));
  EXPECT_EQ(front.code, 0) << front.err;
  EXPECT_EQ(front.out, alone(tokens));
  EXPECT_EQ(other.code, 0) << other.err;
  EXPECT_EQ(other.out + other.err, "");  // only rank 0 speaks
  EXPECT_GT(line.lost(), 0);
  expect_nothing_left({}, before);
}

// A cut that TCP and the deadline outlast.
TEST_F(Hosts, AShortCutIsSurvived) {
  Line line(*hosts_[0], *hosts_[1], kBadLine);
  const std::string tokens = kSoak ? "60" : "6";
  auto nodes = start_both({"--max-new-tokens", tokens});  // the deadline's default: 10 s
  ASSERT_TRUE(nodes[0]->wait_for_output(5, seconds(60)));
  line.cut(true);
  std::this_thread::sleep_for(seconds(3));
  line.cut(false);
  const Finished front = nodes[0]->finish(seconds(kSoak ? 200 : 60));
  EXPECT_EQ(front.code, 0) << front.err;
  EXPECT_EQ(front.out, alone(tokens));
  EXPECT_EQ(nodes[1]->finish(seconds(20)).code, 0);
}

void expect_one_sentence(const Finished& f, const std::vector<std::string>& one_of) {
  EXPECT_EQ(f.code, 1) << f.err;
  EXPECT_EQ(std::count(f.err.begin(), f.err.end(), '\n'), 1) << f.err;
  bool named = false;
  for (const std::string& rank : one_of) {
    named = named || f.err.find("rank " + rank + " was lost") != std::string::npos;
  }
  EXPECT_TRUE(named) << f.err;
}

// A cut of 30 s with --on-rank-loss fail: each side names a rank of the other and ends by itself
// within the cut, and a new start works when the line is whole again. The short form's deadline is
// shorter, and so its cut.
TEST_F(Hosts, ALongCutEndsBothSidesAndANewStartWorks) {
  const std::set<std::string> before = shared_memory();
  Line line(*hosts_[0], *hosts_[1], kBadLine);
  auto nodes = start_both({"--max-new-tokens", "1500", "--exchange-timeout", kSoak ? "10" : "2"});
  ASSERT_TRUE(nodes[0]->wait_for_output(5, seconds(60)));
  const std::set<pid_t> all = family(nodes);
  EXPECT_EQ(all.size(), 4U);
  line.cut(true);
  const TimePoint began = Clock::now();
  const double cut = kSoak ? 30 : 12;
  const Finished front = nodes[0]->finish(seconds(cut));
  const Finished other = nodes[1]->finish(seconds(cut - to_seconds(Clock::now() - began)));
  expect_one_sentence(front, {"2", "3"});
  expect_one_sentence(other, {"0", "1"});
  EXPECT_EQ(other.out, "");
  expect_nothing_left(all, before);
  if (kSoak) std::this_thread::sleep_for(seconds(cut) - (Clock::now() - began));

  line.cut(false);
  auto again = start_both({"--max-new-tokens", "4"});
  const Finished second = again[0]->finish(seconds(60));
  EXPECT_EQ(second.code, 0) << second.err;
  EXPECT_EQ(second.out, alone("4"));
  EXPECT_EQ(again[1]->finish(seconds(20)).code, 0);
}

// The same cut with --on-rank-loss degrade: the side of the front goes on and says what it lacks;
// the other ends. Healing the line does not bring it back into the group.
TEST_F(Hosts, ALongCutWithDegradeLeavesTheFrontsSideGoingOn) {
  const std::set<std::string> before = shared_memory();
  Line line(*hosts_[0], *hosts_[1], kBadLine);
  auto nodes = start_both({"--max-new-tokens", "200", "--exchange-timeout", kSoak ? "10" : "2",
                           "--on-rank-loss", "degrade"});
  ASSERT_TRUE(nodes[0]->wait_for_output(5, seconds(60)));
  const std::set<pid_t> all = family(nodes);
  line.cut(true);
  const double cut = kSoak ? 30 : 12;
  const Finished other = nodes[1]->finish(seconds(cut));
  EXPECT_EQ(other.code, 1) << other.err;
  EXPECT_NE(other.err.find("rank 0"), std::string::npos) << other.err;
  line.cut(false);
  const Finished front = nodes[0]->finish(seconds(60));
  EXPECT_EQ(front.code, 0) << front.err;
  EXPECT_NE(front.err.find("rank 2"), std::string::npos) << front.err;
  EXPECT_NE(front.err.find("degraded"), std::string::npos) << front.err;
  expect_nothing_left(all, before);
}

// A killed node 1 takes its own ranks along and is named by the front.
TEST_F(Hosts, AKilledNodeIsNamed) {
  const std::set<std::string> before = shared_memory();
  const Line line(*hosts_[0], *hosts_[1], kBadLine);
  auto nodes = start_both({"--max-new-tokens", "1500"});
  ASSERT_TRUE(nodes[0]->wait_for_output(5, seconds(60)));
  const std::set<pid_t> all = family(nodes);
  kill(nodes[1]->pid(), SIGKILL);
  const Finished front = nodes[0]->finish(seconds(15));
  EXPECT_EQ(nodes[1]->finish(seconds(1)).code, 128 + SIGKILL);
  expect_one_sentence(front, {"2", "3"});
  expect_nothing_left(all, before);
}

// A user who stops one node stops the group.
TEST_F(Hosts, AnInterruptOnEitherNodeEndsBoth) {
  for (const size_t interrupted : {0U, 1U}) {
    const std::set<std::string> before = shared_memory();
    const Line line(*hosts_[0], *hosts_[1], {});
    auto nodes = start_both({"--max-new-tokens", "1500"});
    ASSERT_TRUE(nodes[0]->wait_for_output(5, seconds(60)));
    const std::set<pid_t> all = family(nodes);
    kill(nodes[interrupted]->pid(), SIGINT);
    const Finished front = nodes[0]->finish(seconds(15));
    const Finished other = nodes[1]->finish(seconds(5));
    EXPECT_GE(front.code, 0) << front.err;
    EXPECT_GE(other.code, 0) << other.err;
    EXPECT_EQ((interrupted == 0 ? front : other).code, 1);
    expect_nothing_left(all, before);
  }
}

// The wrong start on one node: a sentence and an end on both.
TEST_F(Hosts, MistakesAtTheStartEndBothNodes) {
  const Line line(*hosts_[0], *hosts_[1], {});
  const auto both_fail = [&](const std::vector<std::string>& on_0,
                             const std::vector<std::string>& on_1, const std::string& words) {
    auto zero = start(0, on_0);
    auto one = start(1, on_1);
    const Finished f0 = zero->finish(seconds(12));
    const Finished f1 = one->finish(seconds(12));
    for (const Finished& f : {f0, f1}) {
      EXPECT_GT(f.code, 0) << words << ": " << f.err;
      // One sentence, beside rank 0's warnings of whom it refused.
      const size_t sentence = f.err.find("sortie: ");
      ASSERT_NE(sentence, std::string::npos) << words << ": " << f.err;
      EXPECT_EQ(f.err.find('\n', sentence), f.err.size() - 1) << f.err;
    }
    EXPECT_NE((f0.err + f1.err).find(words), std::string::npos) << f0.err << f1.err;
  };
  const auto changed = [](std::vector<std::string> a, const std::string& flag,
                          const std::string& value) {
    *(std::find(a.begin(), a.end(), flag) + 1) = value;
    return a;
  };
  const auto node = [&](int n) {
    return changed(group(n, {"--max-new-tokens", "1"}), "--dist-timeout", "2");
  };
  both_fail(node(0), changed(node(1), "--ep-size", "8"), "for a group of 8 ranks");
  both_fail(node(0),
            changed(node(1), "--max-new-tokens", "1") +
                std::vector<std::string>{"--chunked-prefill-size", "64"},
            "--chunked-prefill-size 64");
  both_fail(node(0), changed(node(1), "--node-rank", "0"), "does not have that address");
  std::ofstream(folder_ / "other") << "not the secret of the two\n";
  chmod((folder_ / "other").c_str(), 0600);
  both_fail(node(0), changed(node(1), "--cluster-key-file", folder_ / "other"), "the same key");
  chmod((folder_ / "other").c_str(), 0644);
  both_fail(node(0), changed(node(1), "--cluster-key-file", folder_ / "other"), "chmod 600");
}

// Without a key only whoever asks for it by name opens a port to other hosts.
TEST_F(Hosts, APortThatOthersReachNeedsAKey) {
  const Line line(*hosts_[0], *hosts_[1], {});
  auto arguments = group(0, {"--max-new-tokens", "1"});
  arguments.erase(std::find(arguments.begin(), arguments.end(), "--cluster-key-file"),
                  std::find(arguments.begin(), arguments.end(), "--dist-timeout"));
  const Finished f = start(0, arguments)->finish(seconds(10));
  EXPECT_EQ(f.code, 2) << f.err;
  EXPECT_NE(f.err.find("--insecure"), std::string::npos) << f.err;
}

// torchrun's environment on two hosts, each process a rank. The master's name is a loopback address
// to itself, as in Debian's /etc/hosts.
TEST_F(Hosts, ALaunchersProcessesAreRanks) {
  const Line line(*hosts_[0], *hosts_[1], {});
  std::vector<std::unique_ptr<SortieProcess>> ranks;
  for (int r = 3; r >= 0; --r) {
    ranks.push_back(std::make_unique<SortieProcess>(
        kPrompt + std::vector<std::string>{"--max-new-tokens", "8", "--cluster-key-file",
                                           folder_ / "key"},
        std::vector<std::string>{"RANK=" + std::to_string(r), "WORLD_SIZE=4",
                                 "LOCAL_RANK=" + std::to_string(r % 2), "LOCAL_WORLD_SIZE=2",
                                 "GROUP_RANK=" + std::to_string(r / 2), "GROUP_WORLD_SIZE=2",
                                 "MASTER_ADDR=host0", "MASTER_PORT=29500"},
        [this, r] { return hosts_[r / 2]->enter(); }));
  }
  std::string out;
  for (const auto& rank : ranks) {
    const Finished f = rank->finish(seconds(60));
    EXPECT_EQ(f.code, 0) << f.err;
    EXPECT_EQ(f.err, "");
    out += f.out;
  }
  EXPECT_EQ(out, alone("8"));  // rank 0's; the others print nothing
}

#endif

}  // namespace
}  // namespace sortie::cli
