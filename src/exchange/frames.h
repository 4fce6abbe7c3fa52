#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace sortie::exchange {

using Bytes = std::vector<std::byte>;

// A frame of a control socket: {u32 length, u32 type, payload}, in the host's byte order (both ends
// run the same program; the handshake between hosts proves it).
struct FrameHead {
  uint32_t length;
  uint32_t type;
};

struct Frame {
  uint32_t type = 0;
  Bytes payload;
};

Bytes make_frame(uint32_t type, std::span<const std::byte> payload);

// Cuts a stream of bytes into frames. Holds what has come of the frame that is not whole yet, and
// nothing in advance of it: a length alone costs no memory.
class FrameReader {
 public:
  explicit FrameReader(uint32_t most) : most_(most) {}

  void push(std::span<const std::byte> bytes);
  // The next whole frame. False: more bytes are needed, or broken().
  bool next(Frame& frame);
  // A frame longer than `most` was announced: nothing behind it can be understood.
  bool broken() const { return broken_; }
  size_t held() const { return in_.size() - at_; }

 private:
  const uint32_t most_;
  Bytes in_;
  size_t at_ = 0;  // bytes of in_ already handed out
  bool broken_ = false;
};

}  // namespace sortie::exchange
