#include "exchange/frames.h"

#include <cstring>

namespace sortie::exchange {

Bytes make_frame(uint32_t type, std::span<const std::byte> payload) {
  const FrameHead head{.length = static_cast<uint32_t>(payload.size()), .type = type};
  Bytes frame(sizeof head + payload.size());
  std::memcpy(frame.data(), &head, sizeof head);
  if (!payload.empty()) std::memcpy(frame.data() + sizeof head, payload.data(), payload.size());
  return frame;
}

void FrameReader::push(std::span<const std::byte> bytes) {
  in_.erase(in_.begin(), in_.begin() + static_cast<ptrdiff_t>(at_));
  at_ = 0;
  in_.insert(in_.end(), bytes.begin(), bytes.end());
}

bool FrameReader::next(Frame& frame) {
  FrameHead head{};
  if (broken_ || held() < sizeof head) return false;
  std::memcpy(&head, in_.data() + at_, sizeof head);
  broken_ = head.length > most_;
  if (broken_ || held() - sizeof head < head.length) return false;
  const auto* begin = in_.data() + at_ + sizeof head;
  frame = {.type = head.type, .payload = Bytes(begin, begin + head.length)};
  at_ += sizeof head + head.length;
  return true;
}

}  // namespace sortie::exchange
