#pragma once

#include <cstddef>
#include <cstdint>

// What dispatch leaves behind and the grouped GEMM and moe_reduce read: plain structs that compute
// and exchange share, so that neither includes the other.
//
//   rows     row_bytes each; token t of a source lies at row source rank * row_stride + t. A row is
//            valid only if a list names it; the bytes of others are undefined (poison).
//   slots    a (source rank, token) has the slot source rank * max_tokens + token.
//   lists    for each local expert its rows, ordered by (source rank, token, k), as
//            prefix sums. Outputs of grouped GEMMs are compact: row i belongs to list entry i.
//   by slot  the same entries seen from the slot, in ascending expert id (then k): the order in
//            which moe_reduce adds.
namespace sortie {

// The combine tree's leaves (docs/numerics.md): leaf(e) = e * leaves / experts, rounded down.
constexpr int kCombineLeaves = 8;
constexpr int combine_leaves(int ep_size) {
  return ep_size > kCombineLeaves ? ep_size : kCombineLeaves;
}

struct ExpertRows {
  int ranks = 1;
  int rank = 0;
  int experts = 0;         // all experts of the layer
  int local_experts = 0;   // ids [rank * local_experts, (rank + 1) * local_experts)
  int64_t max_tokens = 0;  // slots a source rank
  int64_t row_stride = 0;  // rows from one source's first to the next one's; 0 means max_tokens
  int64_t row_count() const { return ranks * (row_stride > 0 ? row_stride : max_tokens); }

  const std::byte* rows = nullptr;  // [row_count()] x row_bytes
  int64_t row_bytes = 0;

  // Sum of counts; on a device, where the host does not know it, the most there can be: the sum is
  // offsets[local_experts].
  int64_t entries = 0;
  const int32_t* offsets = nullptr;    // [local_experts + 1]; count of e = offsets[e+1]-offsets[e]
  const int32_t* row_index = nullptr;  // [entries] into rows
  const float* row_weight = nullptr;   // [entries] routing weight

  int64_t slots = 0;                      // ranks * max_tokens
  const int32_t* slot_offsets = nullptr;  // [slots + 1]
  const int32_t* slot_entries =
      nullptr;  // [entries] indices of entries, ascending expert id a slot
};

// What combine leaves at a token's home: one row from each rank that had an expert of the token.
struct CombinedParts {
  int ranks = 1;
  int64_t max_tokens = 0;
  // [ranks * max_tokens, hidden] of the activations' type; slot = expert rank * max_tokens + token
  const std::byte* rows = nullptr;
  template <typename T>
  const T* rows_of() const {
    return reinterpret_cast<const T*>(rows);
  }
  const uint8_t* present = nullptr;  // [ranks * max_tokens] 1 where a part stands
};

}  // namespace sortie
