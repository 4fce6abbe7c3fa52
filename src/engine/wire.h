#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <variant>
#include <vector>

#include "base/status.h"
#include "engine/engine.h"
#include "engine/request.h"

// What the front and the ranks of other processes say to each other, one message a frame: a byte
// that names the kind, then the fields in the order of their structs, little-endian, counts before
// lists. Both ends are the same build of the same program, so there is no version field.
namespace sortie::engine {

struct CancelMessage {
  uint64_t request = 0;
};
struct StopMessage {};
// A rank's last word: its loop is over.
struct LeftMessage {
  Status status;
};

using Message = std::variant<Request, CancelMessage, StopMessage, Event, RankStats, LeftMessage>;

std::vector<std::byte> encode(const Message& message);
// Refuses anything that encode cannot have made: lengths that lie, values outside their enums,
// bytes left over. Allocates no more than a few times the frame's size.
Result<Message> decode(std::span<const std::byte> frame);

}  // namespace sortie::engine
