#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/exchange_layout.h"
#include "base/status.h"

namespace sortie::exchange {

// What one source rank said about its tokens.
struct SourceTokens {
  int64_t tokens = 0;
  const int32_t* ids = nullptr;    // [tokens, K]; -1 = none
  const float* weights = nullptr;  // [tokens, K]
};

// Names the first token whose id is neither -1 nor an expert.
Status check_ids(std::span<const int32_t> ids, int topk, int experts, int rank, int layer);

// The lists of base/exchange_layout.h, made by counting and prefix sums alone, so that the order is
// (source rank, token, k) whatever the order of arrival. All memory is taken at start.
class ListBuilder {
 public:
  ListBuilder(int ranks, int rank, int experts, int topk, int64_t max_tokens);

  // Fills the list fields of `out`, whose max_tokens (at most the builder's), row_stride and
  // identity are set already. `sources` holds one entry a rank, with ids that check_ids accepted.
  // The lists stay until the next call.
  void build(std::span<const SourceTokens> sources, ExpertRows& out);

 private:
  const int topk_;
  const int first_expert_;
  const int local_experts_;
  std::vector<int32_t> offsets_;       // [local_experts + 1]
  std::vector<int32_t> cursor_;        // [local_experts]
  std::vector<int32_t> row_index_;     // [entries]
  std::vector<float> row_weight_;      // [entries]
  std::vector<int32_t> slot_offsets_;  // [slots + 1]
  std::vector<int32_t> slot_cursor_;   // [slots]
  std::vector<int32_t> slot_entries_;  // [entries]
  std::vector<int32_t> entry_slot_;    // [entries]
};

}  // namespace sortie::exchange
