#include "exchange/control.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "exchange/frames.h"

namespace sortie::exchange {
namespace {

// A star whose ranks are objects of this process.
struct Star {
  explicit Star(int size) {
    std::vector<UniqueFd> hub(static_cast<size_t>(size));
    std::vector<UniqueFd> rim(static_cast<size_t>(size));
    for (size_t r = 1; r < hub.size(); ++r) {
      int pair[2];
      EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
      hub[r] = UniqueFd(pair[0]);
      rim[r] = UniqueFd(pair[1]);
    }
    ranks.push_back(std::make_unique<Control>(0, size, std::move(hub)));
    for (size_t r = 1; r < rim.size(); ++r) {
      std::vector<UniqueFd> one;
      one.push_back(std::move(rim[r]));
      ranks.push_back(std::make_unique<Control>(static_cast<int>(r), size, std::move(one)));
    }
  }
  std::vector<std::unique_ptr<Control>> ranks;
};

Bytes bytes(const std::string& s) {
  const auto* begin = reinterpret_cast<const std::byte*>(s.data());
  return {begin, begin + s.size()};
}
std::string text(const Bytes& b) { return {reinterpret_cast<const char*>(b.data()), b.size()}; }

template <typename Condition>
bool soon(Condition condition) {
  const Deadline deadline(seconds(5));
  while (!condition()) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

// Rank 0's links to a rank 1 that the test plays.
std::vector<UniqueFd> link_to(UniqueFd& rank_1) {
  int pair[2];
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
  rank_1 = UniqueFd(pair[1]);
  std::vector<UniqueFd> links(2);
  links[1] = UniqueFd(pair[0]);
  return links;
}

TEST(Control, AllGatherOfBlobs) {
  Star star(4);
  std::vector<std::thread> threads;
  for (auto& control : star.ranks) {
    threads.emplace_back([&control] {
      for (int round = 0; round < 20; ++round) {
        const std::string mine(static_cast<size_t>(control->rank() * 70000 * (round % 3)), 'a');
        auto all = control->all_gather(bytes(mine), seconds(10));
        ASSERT_TRUE(all.is_ok()) << all.status().message();
        for (int r = 0; r < 4; ++r) {
          EXPECT_EQ((*all)[static_cast<size_t>(r)].size(),
                    static_cast<size_t>(r * 70000 * (round % 3)));
        }
      }
    });
  }
  for (auto& t : threads) t.join();
}

// A rank that says its last word and leaves, while rank 0 has something to say to it: writing fails
// before the word was read.
TEST(Control, LastWordsBeforeAClosedSocketAreRead) {
  for (int round = 0; round < 20; ++round) {
    UniqueFd leaver;
    std::vector<UniqueFd> links = link_to(leaver);
    const Bytes frame = make_frame(7, bytes("last word"));
    ASSERT_EQ(send(leaver.get(), frame.data(), frame.size(), 0),
              static_cast<ssize_t>(frame.size()));
    leaver.reset();
    Control control(0, 2, std::move(links));
    std::atomic<bool> heard{false};
    control.on_frame([&](int from, uint32_t type, const Bytes& payload) {
      heard = from == 1 && type == 7 && text(payload) == "last word";
    });
    ASSERT_TRUE(soon([&] { return control.dead(1); }));
    EXPECT_TRUE(soon([&] { return heard.load(); }));
  }
}

TEST(Control, RanksThatNeverComeAreNamed) {
  Star star(4);
  std::thread two([&] { (void)star.ranks[2]->all_gather({}, seconds(0.2)).is_ok(); });
  const auto all = star.ranks[0]->all_gather({}, seconds(0.2));
  two.join();
  ASSERT_FALSE(all.is_ok());
  EXPECT_EQ(all.status().message(),
            "rank 1, 3 did not join within 0.2 s (--dist-timeout); see whether its process runs, "
            "and start the group again");
}

TEST(Control, FramesArriveInOrderEvenBeforeTheHandler) {
  Star star(2);
  for (int i = 0; i < 100; ++i) star.ranks[0]->send(1, 7, bytes(std::to_string(i)));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  std::atomic<int> next{0};
  star.ranks[1]->on_frame([&](int from, uint32_t type, const Bytes& payload) {
    EXPECT_EQ(from, 0);
    EXPECT_EQ(type, 7U);
    EXPECT_EQ(text(payload), std::to_string(next));
    ++next;
  });
  for (int i = 100; i < 200; ++i) star.ranks[0]->send(1, 7, bytes(std::to_string(i)));
  EXPECT_TRUE(soon([&] { return next == 200; }));
  star.ranks[1]->on_frame(nullptr);
}

TEST(Control, ALargeFrameAndTheLastWordArrive) {
  Star star(2);
  std::atomic<size_t> got{0};
  star.ranks[0]->on_frame([&](int, uint32_t, const Bytes& payload) { got += payload.size(); });
  star.ranks[1]->send(0, 1, Bytes(4 << 20));
  star.ranks[1]->send(0, 2, bytes("bye"));
  star.ranks[1].reset();  // what was queued is sent first
  EXPECT_TRUE(soon([&] { return got == (4U << 20) + 3; }));
}

TEST(Control, EveryRankLearnsOfADeath) {
  Star star(4);
  std::atomic<int> reported{-1};
  star.ranks[3]->on_death([&](int rank) { reported = rank; });
  star.ranks[2].reset();
  for (const size_t r : {0U, 1U, 3U}) {
    EXPECT_TRUE(soon([&] { return star.ranks[r]->dead(2); })) << r;
    EXPECT_FALSE(star.ranks[r]->dead(r == 1 ? 3 : 1));
  }
  EXPECT_TRUE(soon([&] { return reported == 2; }));
  star.ranks[3]->on_death(nullptr);
}

TEST(Control, SignsOfLifeReachRanksThatAreNotNeighbours) {
  Star star(3);
  const TimePoint now = Clock::now();
  EXPECT_TRUE(soon([&] { return star.ranks[1]->last_life(2) > now; }));
  EXPECT_TRUE(soon([&] { return star.ranks[1]->last_life(0) > now; }));
  EXPECT_TRUE(soon([&] { return star.ranks[0]->last_life(1) > now; }));
}

TEST(Control, ASilentRankIsGivenUpInTheEnd) {
  UniqueFd silent;
  Control control(0, 2, link_to(silent));
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_FALSE(control.dead(1));  // nobody asked for it
  control.give_up_after(seconds(0.3));
  EXPECT_TRUE(soon([&] { return control.dead(1); }));
  EXPECT_GE(to_seconds(Clock::now() - control.last_life(1)), 0.3);
}

TEST(Control, AFrameThatIsTooLongEndsTheConnection) {
  UniqueFd rogue;
  Control control(0, 2, link_to(rogue));
  const uint32_t head[2] = {0xffffffff, 1};
  ASSERT_EQ(send(rogue.get(), head, sizeof head, MSG_NOSIGNAL), 8);
  EXPECT_TRUE(soon([&] { return control.dead(1); }));
}

}  // namespace
}  // namespace sortie::exchange
