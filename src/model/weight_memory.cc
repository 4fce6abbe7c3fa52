#include "model/weight_memory.h"

#include <algorithm>
#include <utility>

namespace sortie::model {

namespace {
constexpr size_t kAlign = 64;
constexpr size_t kLeastBlock = size_t{2} << 20;  // a huge page
constexpr size_t kMostBlock = size_t{64} << 20;
}  // namespace

std::byte* WeightMemory::allocate(int64_t bytes) {
  const size_t size = (static_cast<size_t>(bytes) + kAlign - 1) / kAlign * kAlign;
  const std::lock_guard lock(mutex_);
  if (size > left_) {
    // Blocks double, so that a small model does not pay for a large one's.
    const size_t block = std::max(size, std::clamp(total_, kLeastBlock, kMostBlock));
    next_ = owned_.emplace_back(block).data();
    left_ = block;
    total_ += block;
  }
  left_ -= size;
  return std::exchange(next_, next_ + size);
}

const std::byte* WeightMemory::keep(AlignedBuffer buffer) {
  const std::lock_guard lock(mutex_);
  return owned_.emplace_back(std::move(buffer)).data();
}

}  // namespace sortie::model
