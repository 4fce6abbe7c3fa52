#pragma once

#include <cstdint>

// Sizes of the attention kernel's tiles, and which heads it takes (docs/cuda.md).
namespace sortie::cuda {

constexpr int kMlaHeads = 16;        // of a block: the M side of an mma
constexpr int kMlaKeys = 64;         // folded at once
constexpr int kMlaMostLatent = 512;  // kv_lora_rank: accumulators are registers

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Row of the query and key tiles in shared memory, in bf16: the padded width and 16 bytes more, so
// that the eight rows of an ldmatrix fall on different banks.
constexpr int64_t mla_row(int64_t lora, int64_t rope) { return round_up(lora + rope, 16) + 8; }

// Shared memory of a block, bytes: queries, keys, scores, probabilities, three words a head.
constexpr int64_t mla_shared_bytes(int64_t lora, int64_t rope) {
  return (kMlaHeads + kMlaKeys) * mla_row(lora, rope) * 2 + kMlaHeads * (kMlaKeys + 4) * 4 +
         kMlaHeads * (kMlaKeys + 8) * 2 + 3 * kMlaHeads * 4;
}

}  // namespace sortie::cuda
