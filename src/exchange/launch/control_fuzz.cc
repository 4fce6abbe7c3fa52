// What a stranger or a rank can send over a control socket between hosts: the handshake of both
// sides, the frame that joins, and frames in pieces of any size.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/check.h"
#include "exchange/launch/handshake.h"

namespace {

using namespace sortie::exchange;

const ClusterKey kKey = {.secret = Bytes(32, std::byte{7})};

// Feeds one side; whatever comes, nobody without the key is done.
template <typename Side>
std::span<const std::byte> feed(Side& side, std::span<const std::byte> in) {
  while (side.state() == Handshake::State::kGoing && in.size() >= side.wants()) {
    const size_t n = side.wants();
    (void)side.take(in.first(n));
    in = in.subspan(n);
  }
  CHECK(side.state() != Handshake::State::kDone, "authenticated without the key");
  return in;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::span<const std::byte> in = std::as_bytes(std::span(data, size));
  if (in.empty()) return 0;
  const auto choice = static_cast<unsigned>(in[0]);
  in = in.subspan(1);

  HandshakeAtZero zero(kKey, Nonce{});
  HandshakeAtRank rank(kKey, Nonce{});
  if (choice % 4 == 0) in = feed(zero, in);
  if (choice % 4 == 1) in = feed(rank, in);

  Member member;
  if (decode_member(in, member)) {
    const Bytes again = encode_member(member);
    CHECK(std::equal(again.begin(), again.end(), in.begin(), in.end()), "a member's bytes");
    (void)disagreement({.rank = 0, .size = 4}, member);
  }

  FrameReader reader(kMostJoinBytes);
  Frame frame;
  const size_t piece = 1 + choice / 4;
  for (size_t at = 0; at < in.size() && !reader.broken(); at += piece) {
    reader.push(in.subspan(at, std::min(piece, in.size() - at)));
    while (reader.next(frame)) CHECK(frame.payload.size() <= kMostJoinBytes, "a frame's size");
    CHECK(reader.broken() || reader.held() <= sizeof(FrameHead) + kMostJoinBytes + piece, "held");
  }
  return 0;
}
