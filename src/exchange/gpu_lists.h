#pragma once

#include <cstdint>

namespace sortie::exchange {

// What the list kernel reads and writes, all in the device's memory.
struct ListArgs {
  const int32_t* ids;    // [tokens, topk]
  const float* weights;  // [tokens, topk]
  int tokens, topk, experts;
  int32_t* offsets;       // [experts + 1]
  int32_t* row_index;     // [tokens * topk]
  float* row_weight;      // [tokens * topk]
  int32_t* slot_offsets;  // [tokens + 1]
  int32_t* slot_entries;  // [tokens * topk]
  uint8_t* present;       // [tokens]
};

// Enqueues the kernel; the sentence of what went wrong, or null.
const char* enqueue_lists(const ListArgs& args, void* stream);

}  // namespace sortie::exchange
