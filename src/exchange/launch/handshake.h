#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "exchange/frames.h"
#include "exchange/launch/cluster_key.h"

// How a rank of another host and rank 0 prove to each other that they know the cluster key, as two
// machines without sockets: bytes in, bytes out.
//
//   rank -> rank 0   Hello      its nonce, and whether it has a key
//   rank 0 -> rank   Challenge  rank 0's nonce, or a refusal
//   rank -> rank 0   Proof      HMAC(key, "rank", both nonces)
//   rank 0 -> rank   Answer     HMAC(key, "rank 0", both nonces), or a refusal
//
// The nonces are fresh, so an old conversation proves nothing; the labels differ, so a proof sent
// back proves nothing; the stranger who connects proves himself first, so he is given nothing to
// guess a weak key from. It authenticates, it does not encrypt: a network between hosts that others
// can listen on or write to needs a tunnel (docs/exchange.md).
namespace sortie::exchange {

enum class Verdict : uint32_t {
  kGood,
  kWrongKey,
  kKeyNeeded,     // rank 0 has a key, the rank has none
  kNoKeyHere,     // the rank has a key, rank 0 has none
  kOtherProgram,  // not a Sortie of this version and byte order
};
// What the verdict means to a user, at the rank that was refused.
std::string refusal_at_rank(Verdict verdict);
// The same at rank 0.
std::string refusal_at_rank_0(Verdict verdict);

struct Hello {
  char magic[8];
  uint32_t version;
  uint32_t keyed;
  Nonce nonce;
};
struct Challenge {
  char magic[8];
  uint32_t version;
  uint32_t verdict;
  Nonce nonce;
};
struct Proof {
  Mac mac;
};
struct Answer {
  uint32_t verdict;
  Mac mac;
};
static_assert(sizeof(Hello) == 48 && sizeof(Challenge) == 48);
static_assert(sizeof(Proof) == 32 && sizeof(Answer) == 36);

class Handshake {
 public:
  enum class State : uint8_t { kGoing, kDone, kRefused };
  State state() const { return state_; }
  Verdict verdict() const { return verdict_; }
  // How many bytes the next message of the other side has; 0 once it is over.
  size_t wants() const { return wants_; }

 protected:
  explicit Handshake(ClusterKey key, const Nonce& nonce) : key_(std::move(key)), own_(nonce) {}
  Bytes refuse(Verdict verdict, Bytes message = {});
  Mac rank_mac(const Nonce& rank, const Nonce& zero) const;
  Mac zero_mac(const Nonce& rank, const Nonce& zero) const;

  const ClusterKey key_;
  const Nonce own_;
  Nonce other_{};
  State state_ = State::kGoing;
  Verdict verdict_ = Verdict::kGood;
  size_t wants_ = 0;
};

// Rank 0's side of one connection.
class HandshakeAtZero : public Handshake {
 public:
  explicit HandshakeAtZero(ClusterKey key, const Nonce& nonce = random_nonce());
  // Takes one message of wants() bytes; returns what to send, also when it refuses.
  Bytes take(std::span<const std::byte> message);

 private:
  Bytes take_hello(const Hello& hello);
  Bytes take_proof(const Proof& proof);
};

// A rank's side.
class HandshakeAtRank : public Handshake {
 public:
  explicit HandshakeAtRank(ClusterKey key, const Nonce& nonce = random_nonce());
  Bytes hello() const;  // the first message
  Bytes take(std::span<const std::byte> message);

 private:
  Bytes take_challenge(const Challenge& challenge);
  Bytes take_answer(const Answer& answer);
};

// ---- What follows, in frames: who joins, and rank 0's word.

constexpr uint32_t kJoinFrame = 1;
constexpr uint32_t kWelcomeFrame = 2;  // the group is complete
constexpr uint32_t kRefusedFrame = 3;  // a sentence
constexpr uint32_t kMostJoinBytes = 64 << 10;

// One process that joins, as it describes itself.
struct Member {
  uint32_t rank = 0;
  uint32_t size = 0;  // ranks of the group
  uint32_t here = 1;  // ranks that its node's command started
  uint32_t nodes = 1;
  std::string job;   // LaunchPlan::job
  std::string host;  // its host's name, for sentences
  // "name value" lines that must be the same on all ranks.
  std::vector<std::string> settings;
};
Bytes encode_member(const Member& member);
// False if malformed: the bytes come from a rank that knows the key, and are checked all the same.
bool decode_member(std::span<const std::byte> bytes, Member& member);

// Why `member` cannot be part of rank 0's group, or "". `zero` describes rank 0.
std::string disagreement(const Member& zero, const Member& member);

}  // namespace sortie::exchange
