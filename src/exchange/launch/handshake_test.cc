#include "exchange/launch/handshake.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "base/folder_test_util.h"

namespace sortie::exchange {
namespace {

using State = Handshake::State;

ClusterKey key_of(const std::string& text) {
  const auto bytes = std::as_bytes(std::span<const char>(text));
  return {.secret = {bytes.begin(), bytes.end()}};
}

std::string hex(const Mac& mac) {
  std::string text;
  for (const std::byte b : mac) {
    char two[3];
    std::snprintf(two, sizeof two, "%02x", static_cast<unsigned>(b));
    text += two;
  }
  return text;
}

// RFC 4231, test case 2, with the zero byte behind it that ends a label; the value by `openssl
// mac`.
TEST(Handshake, HmacIsThatOfOpenssl) {
  EXPECT_EQ(hex(hmac_sha256(key_of("Jefe"), "what do ya want for nothing?", {})),
            "4fd2cd52032b7d4c8c0faac64edd70d083ded8a88aaf5bb3b60c8e40a83de008");
}

// Both sides, with a hand between them that may change the messages.
struct Talk {
  HandshakeAtRank rank;
  HandshakeAtZero zero;
  Talk(const ClusterKey& at_rank, const ClusterKey& at_zero) : rank(at_rank), zero(at_zero) {}
  void run() {
    Bytes message = rank.hello();
    while (true) {
      message = zero.take(message);
      if (message.empty()) return;
      message = rank.take(message);
      if (message.empty()) return;
    }
  }
};

TEST(Handshake, TheSameKeyOnBothSides) {
  for (const std::string text : {"", "0123456789abcdef"}) {
    Talk talk(key_of(text), key_of(text));
    talk.run();
    EXPECT_EQ(talk.rank.state(), State::kDone) << text;
    EXPECT_EQ(talk.zero.state(), State::kDone) << text;
  }
}

TEST(Handshake, AnotherKeyOrNoneIsRefusedOnBothSides) {
  const ClusterKey none;
  const ClusterKey a = key_of("0123456789abcdef");
  const ClusterKey b = key_of("0123456789abcdeg");
  struct Case {
    ClusterKey rank, zero;
    Verdict verdict;
  };
  for (const Case& c : {Case{a, b, Verdict::kWrongKey}, Case{none, a, Verdict::kKeyNeeded},
                        Case{a, none, Verdict::kNoKeyHere}}) {
    Talk talk(c.rank, c.zero);
    talk.run();
    EXPECT_EQ(talk.rank.state(), State::kRefused);
    EXPECT_EQ(talk.zero.state(), State::kRefused);
    EXPECT_EQ(talk.rank.verdict(), c.verdict);
    EXPECT_EQ(talk.zero.verdict(), c.verdict);
  }
}

// A rank 0 that does not know the key can only send back what it is sent.
TEST(Handshake, AProofSentBackProvesNothing) {
  HandshakeAtRank rank(key_of("0123456789abcdef"));
  Challenge challenge{};
  std::memcpy(&challenge, rank.hello().data(), sizeof challenge);  // its own nonce
  challenge.verdict = 0;
  const Bytes proof = rank.take(std::as_bytes(std::span(&challenge, 1)));
  ASSERT_EQ(proof.size(), sizeof(Proof));
  Answer answer{};
  std::memcpy(&answer.mac, proof.data(), sizeof answer.mac);
  EXPECT_TRUE(rank.take(std::as_bytes(std::span(&answer, 1))).empty());
  EXPECT_EQ(rank.state(), State::kRefused);
}

// A stranger relays rank 0's challenge to no one, and plays back what an earlier rank has sent.
TEST(Handshake, AnOldConversationProvesNothing) {
  const ClusterKey key = key_of("0123456789abcdef");
  HandshakeAtRank rank(key);
  HandshakeAtZero first(key);
  const Bytes hello = rank.hello();
  const Bytes proof = rank.take(first.take(hello));
  const Bytes answer = first.take(proof);
  EXPECT_EQ(first.state(), State::kDone);

  HandshakeAtZero second(key);
  (void)second.take(hello);
  (void)second.take(proof);
  EXPECT_EQ(second.state(), State::kRefused);

  HandshakeAtRank other(key);  // and an impostor of rank 0 plays back its side
  HandshakeAtZero third(key);
  (void)other.take(third.take(hello));
  (void)other.take(answer);
  EXPECT_EQ(other.state(), State::kRefused);
}

TEST(Handshake, AnotherProgramIsToldNothing) {
  HandshakeAtZero zero(key_of("0123456789abcdef"));
  const std::string http = "GET / HTTP/1.1\r\nHost: here\r\nAccept: text/html,*/*\r\n\r\n";
  const auto bytes = std::as_bytes(std::span<const char>(http)).first(zero.wants());
  EXPECT_TRUE(zero.take(bytes).empty());
  EXPECT_EQ(zero.verdict(), Verdict::kOtherProgram);
}

TEST(Member, SurvivesTheWireAndNothingElseDoes) {
  const Member m{.rank = 2,
                 .size = 4,
                 .here = 2,
                 .nodes = 2,
                 .job = "Slurm 1.0",
                 .host = "b",
                 .settings = {"--deepep-mode auto", "model 77"}};
  const Bytes bytes = encode_member(m);
  Member back;
  ASSERT_TRUE(decode_member(bytes, back));
  EXPECT_EQ(encode_member(back), bytes);
  for (size_t n = 0; n < bytes.size(); ++n) {
    EXPECT_FALSE(decode_member(std::span(bytes).first(n), back)) << n;
  }
  Member rude = m;
  rude.host = "\x1b[2J";
  EXPECT_FALSE(decode_member(encode_member(rude), back));
}

TEST(Member, DisagreementsAreNamed) {
  const Member zero{.rank = 0, .size = 4, .here = 2, .nodes = 2, .settings = {"--page-size 64"}};
  Member m{.rank = 2, .size = 4, .here = 2, .nodes = 2, .host = "b", .settings = zero.settings};
  EXPECT_EQ(disagreement(zero, m), "");
  m.size = 8;
  EXPECT_NE(disagreement(zero, m).find("rank 2 on b was started for a group of 8 ranks"),
            std::string::npos);
  m = {.rank = 2, .size = 4, .here = 2, .nodes = 2, .host = "b", .settings = {"--page-size 32"}};
  EXPECT_NE(disagreement(zero, m).find("has --page-size 32 and rank 0 has --page-size 64"),
            std::string::npos);
  m = {.rank = 0, .size = 4, .here = 2, .nodes = 2, .host = "b", .settings = zero.settings};
  EXPECT_NE(disagreement(zero, m).find("--node-rank"), std::string::npos);
}

// ---- The key's file

class KeyFile : public testing::Test {
 protected:
  std::string write(const std::string& text, mode_t mode) {
    const std::string path = folder_ / "key";
    std::ofstream(path) << text;
    chmod(path.c_str(), mode);
    return path;
  }
  TemporaryFolder folder_;
};

TEST_F(KeyFile, IsReadWithoutItsNewline) {
  const auto key = read_cluster_key(write("0123456789abcdef\n", 0600));
  ASSERT_TRUE(key.is_ok()) << key.status().message();
  EXPECT_EQ(key->secret, key_of("0123456789abcdef").secret);
}

TEST_F(KeyFile, ThatOthersCanReadIsRefused) {
  for (const mode_t mode : {0640, 0604, 0620, 0644}) {
    const std::string path = write("0123456789abcdef\n", mode);
    const auto key = read_cluster_key(path);
    ASSERT_FALSE(key.is_ok());
    EXPECT_NE(key.status().message().find("chmod 600 " + path), std::string::npos);
  }
}

TEST_F(KeyFile, ThatIsNoKeyIsRefused) {
  EXPECT_FALSE(read_cluster_key(folder_ / "none").is_ok());
  EXPECT_FALSE(read_cluster_key(folder_.path()).is_ok());
  EXPECT_FALSE(read_cluster_key(write("short\n", 0600)).is_ok());
  EXPECT_FALSE(read_cluster_key(write(std::string(5000, 'x'), 0600)).is_ok());
}

TEST_F(KeyFile, OfThisHostIsMadeOnceAndKept) {
  const char* before = getenv("XDG_RUNTIME_DIR");
  const std::string saved = before == nullptr ? "" : before;
  setenv("XDG_RUNTIME_DIR", folder_.path().c_str(), 1);
  const auto first = host_cluster_key();
  const auto second = host_cluster_key();
  chmod((folder_ / "sortie").c_str(), 0755);
  const auto third = host_cluster_key();
  before == nullptr ? unsetenv("XDG_RUNTIME_DIR") : setenv("XDG_RUNTIME_DIR", saved.c_str(), 1);
  ASSERT_TRUE(first.is_ok()) << first.status().message();
  ASSERT_TRUE(second.is_ok());
  EXPECT_EQ(first->secret.size(), 64U);
  EXPECT_EQ(first->secret, second->secret);
  EXPECT_FALSE(third.is_ok());  // somebody else could have put a key there
}

}  // namespace
}  // namespace sortie::exchange
