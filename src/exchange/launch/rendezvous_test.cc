// Meetings over the loopback address: ranks are threads, strangers are sockets of the test.
#include "exchange/launch/rendezvous.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace sortie::exchange {
namespace {

ClusterKey key_of(const std::string& text) {
  const auto bytes = std::as_bytes(std::span<const char>(text));
  return {.secret = {bytes.begin(), bytes.end()}};
}
const ClusterKey kKey = key_of("a key that the ranks share");

bool contains(const std::string& s, const std::string& part) {
  return s.find(part) != std::string::npos;
}

sockaddr_in loopback(int port) {
  sockaddr_in a{};
  a.sin_family = AF_INET;
  a.sin_port = htons(static_cast<uint16_t>(port));
  a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return a;
}

// A port that was free a moment ago.
int free_port() {
  const UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in a = loopback(0);
  socklen_t length = sizeof a;
  EXPECT_EQ(bind(fd.get(), reinterpret_cast<sockaddr*>(&a), sizeof a), 0);
  EXPECT_EQ(getsockname(fd.get(), reinterpret_cast<sockaddr*>(&a), &length), 0);
  return ntohs(a.sin_port);
}

UniqueFd stranger(int port) {
  const sockaddr_in a = loopback(port);
  for (int tries = 0; tries < 200; ++tries) {
    UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&a), sizeof a) == 0) return fd;
    usleep(5000);
  }
  ADD_FAILURE() << "nobody listens";
  return {};
}

// What a socket says until it closes.
std::string rest_of(const UniqueFd& fd) {
  std::string all;
  char buffer[512];
  ssize_t n = 0;
  while ((n = recv(fd.get(), buffer, sizeof buffer, 0)) > 0) all.append(buffer, buffer + n);
  return all;
}

struct Group {
  explicit Group(int size, double timeout = 10) {
    const int port = free_port();
    for (int r = 0; r < size; ++r) {
      meetings.push_back({.host = "127.0.0.1",
                          .port = port,
                          .timeout = seconds(timeout),
                          .key = kKey,
                          .me = {.rank = static_cast<uint32_t>(r),
                                 .size = static_cast<uint32_t>(size),
                                 .nodes = 2,
                                 .host = "host" + std::to_string(r)}});
    }
  }
  int port() const { return meetings[0].port; }
  // Runs all ranks at once, and `beside` with them; leaves each rank's status.
  void run(const std::function<void()>& beside = [] {}) {
    std::vector<std::thread> threads;
    statuses.resize(meetings.size());
    sockets.resize(meetings.size());
    for (size_t i = 0; i < meetings.size(); ++i) {
      threads.emplace_back([this, i] {
        if (i == 0) {
          auto links = hold_meeting(meetings[0], 1);
          statuses[0] = links.status();
          if (links) hub = std::move(*links);
        } else {
          auto link = join_meeting(meetings[i]);
          statuses[i] = link.status();
          if (link) sockets[i] = std::move(*link);
        }
      });
    }
    beside();
    for (std::thread& t : threads) t.join();
  }
  void expect_good() const {
    for (const Status& s : statuses) EXPECT_TRUE(s.is_ok()) << s.message();
  }
  void expect_all(const std::string& part) const {
    for (size_t i = 0; i < statuses.size(); ++i) {
      EXPECT_TRUE(contains(statuses[i].message(), part)) << i << ": " << statuses[i].message();
    }
  }
  std::vector<Meeting> meetings;
  std::vector<Status> statuses;
  std::vector<UniqueFd> hub, sockets;
};

TEST(Rendezvous, RanksComeInAnyOrderAndAreLinked) {
  Group group(5);
  group.run();
  group.expect_good();
  ASSERT_EQ(group.hub.size(), 5U);
  EXPECT_FALSE(group.hub[0].open());
  for (size_t r = 1; r < 5; ++r) {
    const char mine = static_cast<char>('a' + r);
    char got = 0;
    ASSERT_EQ(send(group.hub[r].get(), &mine, 1, 0), 1);
    ASSERT_EQ(recv(group.sockets[r].get(), &got, 1, 0), 1);
    EXPECT_EQ(got, mine);
    EXPECT_EQ(local_address(group.sockets[r]), "127.0.0.1");
  }
}

// Somebody who connects and says nothing, one who talks HTTP, one who sends noise, one who goes.
TEST(Rendezvous, StrangersDoNotDisturb) {
  Group group(3);
  group.meetings.pop_back();  // rank 2 comes later, so that the strangers have their time
  std::thread late;
  UniqueFd silent;
  group.run([&] {
    silent = stranger(group.port());
    UniqueFd http = stranger(group.port());
    const std::string request = "GET / HTTP/1.1\r\nHost: here\r\nAccept: text/html,*/*\r\n\r\n";
    ASSERT_GT(send(http.get(), request.data(), request.size(), MSG_NOSIGNAL), 0);
    EXPECT_EQ(rest_of(http), "");  // told nothing
    UniqueFd noise = stranger(group.port());
    std::string bytes(100000, '\xa5');
    (void)send(noise.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    stranger(group.port()).reset();
    Meeting two = group.meetings[1];
    two.me.rank = 2;
    auto link = join_meeting(two);
    EXPECT_TRUE(link.is_ok()) << link.status().message();
  });
  group.expect_good();
}

// More silent connections than there are places: the ranks still come through.
TEST(Rendezvous, AFloodOfSilentConnectionsDoesNotKeepRanksOut) {
  Group group(2);
  Meeting one = group.meetings[1];
  group.meetings.pop_back();
  std::vector<UniqueFd> silent;
  group.run([&] {
    for (int i = 0; i < 100; ++i) silent.push_back(stranger(group.port()));
    auto link = join_meeting(one);
    EXPECT_TRUE(link.is_ok()) << link.status().message();
  });
  group.expect_good();
}

TEST(Rendezvous, AWrongKeyIsNamedOnBothSides) {
  Group group(3, 0.6);
  group.meetings[2].key = key_of("not the key of the group");
  group.run();
  EXPECT_TRUE(contains(group.statuses[0].message(), "rank 2 did not join"));
  EXPECT_TRUE(contains(group.statuses[0].message(), "it does not know the cluster key"));
  EXPECT_TRUE(contains(group.statuses[2].message(), "do not have the same key"));
  EXPECT_TRUE(contains(group.statuses[1].message(), "rank 2 did not join") ||
              contains(group.statuses[1].message(), "rank 1 waited"))
      << group.statuses[1].message();
}

TEST(Rendezvous, ARankWithoutAKeyIsRefused) {
  Group group(2, 0.5);
  group.meetings[1].key = {};
  group.run();
  EXPECT_TRUE(contains(group.statuses[0].message(), "it has no cluster key"));
  EXPECT_TRUE(contains(group.statuses[1].message(), "it wants a key"));
}

TEST(Rendezvous, AddressesThatOthersReachNeedAKey) {
  Group group(2, 0.5);
  for (Meeting& m : group.meetings) {
    m.key = {};
    m.host = "0.0.0.0";
  }
  group.run();
  group.expect_all("--cluster-key-file");
  EXPECT_EQ(group.statuses[0].code(), StatusCode::kUsage);
  for (Meeting& m : group.meetings) m.insecure = true;
  group.run();
  group.expect_good();
}

TEST(Rendezvous, ARankThatCameTwiceEndsIt) {
  Group group(4);
  group.meetings[3].me.rank = 2;
  group.meetings[1].timeout = seconds(2);  // it may find nobody there any more
  group.run();
  for (const size_t r : {0U, 2U, 3U}) {
    EXPECT_TRUE(contains(group.statuses[r].message(), "rank 2 came twice"))
        << group.statuses[r].message();
  }
  EXPECT_FALSE(group.statuses[1].is_ok());
}

TEST(Rendezvous, AnotherWorldSizeEndsItForAll) {
  Group group(3);
  group.meetings[2].me.size = 8;
  group.meetings[1].timeout = seconds(3);
  group.run();
  EXPECT_TRUE(contains(group.statuses[0].message(), "for a group of 8 ranks"));
  EXPECT_EQ(group.statuses[0].message(), group.statuses[2].message());
  // Rank 1 heard it too, or found nobody there any more.
  EXPECT_FALSE(group.statuses[1].is_ok());
}

TEST(Rendezvous, OtherSettingsEndIt) {
  Group group(2);
  group.meetings[1].me.settings = {"--page-size 32"};
  group.meetings[0].me.settings = {"--page-size 64"};
  group.run();
  group.expect_all("has --page-size 32 and rank 0 has --page-size 64");
}

// A rank of another launch that knows the key and the port is sent away; the group goes on.
TEST(Rendezvous, TwoGroupsAreNotMistakenForEachOther) {
  Group group(2);
  for (Meeting& m : group.meetings) m.me.job = "Slurm 7.0";
  Meeting one = group.meetings[1];
  group.meetings.pop_back();
  group.run([&] {
    Meeting foreign = one;
    foreign.me.job = "Slurm 8.0";
    const auto refused = join_meeting(foreign);
    EXPECT_TRUE(contains(refused.status().message(), "belongs to another group"))
        << refused.status().message();
    const auto link = join_meeting(one);
    EXPECT_TRUE(link.is_ok()) << link.status().message();
  });
  group.expect_good();
}

TEST(Rendezvous, WhoNeverComesIsNamedInTime) {
  Group group(4, 0.4);
  group.meetings.pop_back();
  const TimePoint began = Clock::now();
  group.run();
  EXPECT_LT(to_seconds(Clock::now() - began), 3);
  EXPECT_TRUE(contains(group.statuses[0].message(), "rank 3 did not join rank 0"))
      << group.statuses[0].message();
  for (const Status& s : group.statuses) EXPECT_FALSE(s.is_ok());
}

UniqueFd listener(int port) {
  UniqueFd other(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_in a = loopback(port);
  EXPECT_EQ(bind(other.get(), reinterpret_cast<const sockaddr*>(&a), sizeof a), 0);
  EXPECT_EQ(listen(other.get(), 1), 0);
  return other;
}

TEST(Rendezvous, NobodyListens) {
  Group group(2, 0.3);
  const auto link = join_meeting(group.meetings[1]);
  EXPECT_TRUE(contains(link.status().message(), "rank 1 cannot reach rank 0 on 127.0.0.1:"))
      << link.status().message();
}

TEST(Rendezvous, APortInUseAndAnAddressOfAnotherHost) {
  Group group(2, 0.3);
  const UniqueFd other = listener(group.port());
  EXPECT_TRUE(
      contains(hold_meeting(group.meetings[0], 1).status().message(), "the port is in use"));
  group.meetings[0].host = "192.0.2.1";  // of no host (RFC 5737)
  EXPECT_TRUE(contains(hold_meeting(group.meetings[0], 1).status().message(),
                       "does not have that address"));
  group.meetings[0].host = "no-such-host.invalid";
  EXPECT_TRUE(contains(hold_meeting(group.meetings[0], 1).status().message(), "has no address"));
}

// Another program has the port: a rank does not hang on it.
TEST(Rendezvous, AListenerThatSaysNothing) {
  Group group(2, 0.3);
  const UniqueFd other = listener(group.port());
  const auto link = join_meeting(group.meetings[1]);
  EXPECT_TRUE(contains(link.status().message(), "rank 1 waited for rank 0"))
      << link.status().message();
}

TEST(Rendezvous, ARankThatEndsWhileItWaitsIsNamed) {
  Group group(3);
  Meeting one = group.meetings[1];
  group.meetings.resize(1);
  one.timeout = seconds(0.3);
  group.run([&] { EXPECT_FALSE(join_meeting(one).is_ok()); });
  EXPECT_TRUE(contains(group.statuses[0].message(), "rank 1 on host1 ended while"))
      << group.statuses[0].message();
}

}  // namespace
}  // namespace sortie::exchange
