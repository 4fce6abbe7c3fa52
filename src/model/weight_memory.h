#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>

#include "base/arena.h"

namespace sortie::model {

// Memory for weights that are kept for good, one piece after the other in large blocks: an expert's
// matrix alone is often smaller than a huge page. Any thread may allocate.
class WeightMemory {
 public:
  // The blocks go to `owned`, which has to live as long as the pieces.
  explicit WeightMemory(std::deque<AlignedBuffer>& owned) : owned_(owned) {}

  std::byte* allocate(int64_t bytes);           // 64-byte aligned
  const std::byte* keep(AlignedBuffer buffer);  // as a block of its own

 private:
  std::deque<AlignedBuffer>& owned_;
  std::mutex mutex_;
  std::byte* next_ = nullptr;
  size_t left_ = 0;
  size_t total_ = 0;  // of all blocks made here
};

}  // namespace sortie::model
