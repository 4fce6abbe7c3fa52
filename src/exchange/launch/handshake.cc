#include "exchange/launch/handshake.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace sortie::exchange {
namespace {

constexpr char kMagic[8] = {'S', 'O', 'R', 'T', 'I', 'E', '\r', '\n'};
// Counts changes of anything that ranks send each other. As a number it shows a foreign byte order.
constexpr uint32_t kVersion = 1;

template <typename T>
Bytes bytes_of(const T& message) {
  const auto bytes = std::as_bytes(std::span<const T>(&message, 1));
  return {bytes.begin(), bytes.end()};
}

template <typename T>
T message_of(std::span<const std::byte> bytes) {
  T message;
  CHECK(bytes.size() == sizeof message, "a message of the size that was asked for");
  std::memcpy(&message, bytes.data(), sizeof message);
  return message;
}

template <typename T>
bool ours(const T& message) {
  return std::memcmp(message.magic, kMagic, sizeof kMagic) == 0 && message.version == kVersion;
}

template <typename T>
T marked() {
  T message{};
  std::memcpy(message.magic, kMagic, sizeof kMagic);
  message.version = kVersion;
  return message;
}

struct Refusal {
  const char* at_rank;
  const char* at_rank_0;
};

Refusal refusal(Verdict verdict) {
  switch (verdict) {
    case Verdict::kGood:
      return {"", ""};
    case Verdict::kWrongKey:
      return {"the two do not have the same key; give the same --cluster-key-file on all nodes",
              "it does not know the cluster key"};
    case Verdict::kKeyNeeded:
      return {"it wants a key; give its --cluster-key-file here too", "it has no cluster key"};
    case Verdict::kNoKeyHere:
      return {"it runs without a key and this rank has one; give --cluster-key-file on all nodes",
              "it has a cluster key and rank 0 has none"};
    case Verdict::kOtherProgram:
      break;
  }
  return {"it is not a Sortie of this version; run the same program on all nodes",
          "it is not a Sortie of this version"};
}

}  // namespace

std::string refusal_at_rank(Verdict verdict) { return refusal(verdict).at_rank; }

std::string refusal_at_rank_0(Verdict verdict) { return refusal(verdict).at_rank_0; }

Bytes Handshake::refuse(Verdict verdict, Bytes message) {
  state_ = State::kRefused;
  verdict_ = verdict;
  wants_ = 0;
  return message;
}

Mac Handshake::rank_mac(const Nonce& rank, const Nonce& zero) const {
  return hmac_sha256(key_, "sortie control 1: rank", {rank, zero});
}
Mac Handshake::zero_mac(const Nonce& rank, const Nonce& zero) const {
  return hmac_sha256(key_, "sortie control 1: rank 0", {rank, zero});
}

HandshakeAtZero::HandshakeAtZero(ClusterKey key, const Nonce& nonce)
    : Handshake(std::move(key), nonce) {
  wants_ = sizeof(Hello);
}

Bytes HandshakeAtZero::take(std::span<const std::byte> message) {
  return wants_ == sizeof(Hello) ? take_hello(message_of<Hello>(message))
                                 : take_proof(message_of<Proof>(message));
}

Bytes HandshakeAtZero::take_hello(const Hello& hello) {
  auto challenge = marked<Challenge>();
  // To whatever speaks another language nothing is said.
  if (!ours(hello)) return refuse(Verdict::kOtherProgram);
  const bool keyed = hello.keyed != 0;
  if (keyed == key_.open()) {
    const Verdict verdict = keyed ? Verdict::kNoKeyHere : Verdict::kKeyNeeded;
    challenge.verdict = static_cast<uint32_t>(verdict);
    return refuse(verdict, bytes_of(challenge));
  }
  other_ = hello.nonce;
  challenge.nonce = own_;
  wants_ = sizeof(Proof);
  return bytes_of(challenge);
}

Bytes HandshakeAtZero::take_proof(const Proof& proof) {
  Answer answer{};
  if (!same_mac(proof.mac, rank_mac(other_, own_))) {
    answer.verdict = static_cast<uint32_t>(Verdict::kWrongKey);
    return refuse(Verdict::kWrongKey, bytes_of(answer));
  }
  answer.mac = zero_mac(other_, own_);
  state_ = State::kDone;
  wants_ = 0;
  return bytes_of(answer);
}

HandshakeAtRank::HandshakeAtRank(ClusterKey key, const Nonce& nonce)
    : Handshake(std::move(key), nonce) {
  wants_ = sizeof(Challenge);
}

Bytes HandshakeAtRank::hello() const {
  auto hello = marked<Hello>();
  hello.keyed = key_.open() ? 0 : 1;
  hello.nonce = own_;
  return bytes_of(hello);
}

Bytes HandshakeAtRank::take(std::span<const std::byte> message) {
  return wants_ == sizeof(Challenge) ? take_challenge(message_of<Challenge>(message))
                                     : take_answer(message_of<Answer>(message));
}

Bytes HandshakeAtRank::take_challenge(const Challenge& challenge) {
  if (!ours(challenge)) return refuse(Verdict::kOtherProgram);
  if (challenge.verdict != 0) {
    const bool known = challenge.verdict <= static_cast<uint32_t>(Verdict::kOtherProgram);
    return refuse(known ? static_cast<Verdict>(challenge.verdict) : Verdict::kOtherProgram);
  }
  other_ = challenge.nonce;
  wants_ = sizeof(Answer);
  return bytes_of(Proof{rank_mac(own_, other_)});
}

Bytes HandshakeAtRank::take_answer(const Answer& answer) {
  if (answer.verdict != 0 || !same_mac(answer.mac, zero_mac(own_, other_))) {
    return refuse(Verdict::kWrongKey);
  }
  state_ = State::kDone;
  wants_ = 0;
  return {};
}

// ---- Member

namespace {

void append(Bytes& out, const void* data, size_t bytes) {
  const size_t at = out.size();
  out.resize(at + bytes);
  if (bytes > 0) std::memcpy(out.data() + at, data, bytes);
}
void put(Bytes& out, uint32_t value) { append(out, &value, sizeof value); }
void put(Bytes& out, const std::string& text) {
  put(out, static_cast<uint32_t>(text.size()));
  append(out, text.data(), text.size());
}

bool get(std::span<const std::byte>& in, uint32_t& value) {
  if (in.size() < sizeof value) return false;
  std::memcpy(&value, in.data(), sizeof value);
  in = in.subspan(sizeof value);
  return true;
}
// Control characters would reach a terminal within sentences.
bool get(std::span<const std::byte>& in, std::string& text) {
  uint32_t length = 0;
  if (!get(in, length) || in.size() < length) return false;
  text.assign(reinterpret_cast<const char*>(in.data()), length);
  in = in.subspan(length);
  return std::none_of(text.begin(), text.end(), [](char c) { return c >= 0 && c < ' '; });
}

std::string who(const Member& m) {
  return fmt::format("rank {} on {}", m.rank, m.host.empty() ? "a host without a name" : m.host);
}

}  // namespace

Bytes encode_member(const Member& m) {
  Bytes out;
  for (const uint32_t value : {m.rank, m.size, m.here, m.nodes}) put(out, value);
  put(out, m.job);
  put(out, m.host);
  put(out, static_cast<uint32_t>(m.settings.size()));
  for (const std::string& line : m.settings) put(out, line);
  return out;
}

bool decode_member(std::span<const std::byte> in, Member& m) {
  uint32_t lines = 0;
  if (!get(in, m.rank) || !get(in, m.size) || !get(in, m.here) || !get(in, m.nodes) ||
      !get(in, m.job) || !get(in, m.host) || !get(in, lines)) {
    return false;
  }
  m.settings.clear();
  for (uint32_t i = 0; i < lines; ++i) {
    std::string line;
    if (!get(in, line)) return false;
    m.settings.push_back(std::move(line));
  }
  return in.empty();
}

std::string disagreement(const Member& zero, const Member& m) {
  if (m.size != zero.size) {
    return fmt::format(
        "{} was started for a group of {} ranks and rank 0 for one of {}; give the same --ep-size "
        "(or number of processes) on all nodes",
        who(m), m.size, zero.size);
  }
  if (m.nodes != zero.nodes || m.here != zero.here) {
    return fmt::format(
        "{} was started for {} nodes and rank 0 for {}; give the same --nnodes on "
        "all nodes",
        who(m), m.nodes, zero.nodes);
  }
  if (m.rank == 0 || m.rank >= m.size) {
    return fmt::format("{} joined rank 0, which cannot be; give each node another --node-rank",
                       who(m));
  }
  for (size_t i = 0; i < std::max(m.settings.size(), zero.settings.size()); ++i) {
    const std::string here = i < m.settings.size() ? m.settings[i] : "nothing";
    const std::string there = i < zero.settings.size() ? zero.settings[i] : "nothing";
    if (here == there) continue;
    return fmt::format("{} has {} and rank 0 has {}; start all nodes with the same model and flags",
                       who(m), here, there);
  }
  return "";
}

}  // namespace sortie::exchange
