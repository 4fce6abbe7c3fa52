#include "exchange/lists.h"

#include <fmt/format.h>

#include <algorithm>

namespace sortie::exchange {

Status check_ids(std::span<const int32_t> ids, int topk, int experts, int rank, int layer) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= -1 && ids[i] < experts) continue;
    return Status::invalid(
        fmt::format("layer {}, dispatch: token {} of rank {} names expert {}, which is neither -1 "
                    "(none) nor one of 0..{}",
                    layer, i / static_cast<size_t>(topk), rank, ids[i], experts - 1));
  }
  return Status::ok();
}

ListBuilder::ListBuilder(int ranks, int rank, int experts, int topk, int64_t max_tokens)
    : topk_(topk), first_expert_(rank * (experts / ranks)), local_experts_(experts / ranks) {
  const auto slots = static_cast<size_t>(ranks * max_tokens);
  const size_t entries = slots * static_cast<size_t>(topk);
  offsets_.resize(static_cast<size_t>(local_experts_) + 1);
  cursor_.resize(static_cast<size_t>(local_experts_));
  row_index_.resize(entries);
  row_weight_.resize(entries);
  slot_offsets_.resize(slots + 1);
  slot_cursor_.resize(slots);
  slot_entries_.resize(entries);
  entry_slot_.resize(entries);
}

void ListBuilder::build(std::span<const SourceTokens> sources, ExpertRows& out) {
  const int64_t max_tokens = out.max_tokens;
  const int64_t slots = static_cast<int64_t>(sources.size()) * max_tokens;
  const int64_t row_stride = out.row_stride > 0 ? out.row_stride : max_tokens;
  const auto local = [this](int32_t id) { return id - first_expert_; };
  const auto is_local = [this](int32_t e) { return e >= 0 && e < local_experts_; };

  std::fill(offsets_.begin(), offsets_.end(), 0);
  std::fill_n(slot_offsets_.begin(), slots + 1, 0);
  for (size_t source = 0; source < sources.size(); ++source) {
    const SourceTokens& s = sources[source];
    const int64_t slot0 = static_cast<int64_t>(source) * max_tokens;
    for (int64_t i = 0; i < s.tokens * topk_; ++i) {
      const int32_t e = local(s.ids[i]);
      if (!is_local(e)) continue;
      ++offsets_[e + 1];
      ++slot_offsets_[slot0 + i / topk_ + 1];
    }
  }
  for (int e = 0; e < local_experts_; ++e) {
    offsets_[e + 1] += offsets_[e];
    cursor_[e] = offsets_[e];
  }
  for (int64_t slot = 0; slot < slots; ++slot) {
    slot_offsets_[slot + 1] += slot_offsets_[slot];
    slot_cursor_[slot] = slot_offsets_[slot];
  }

  for (size_t source = 0; source < sources.size(); ++source) {
    const SourceTokens& s = sources[source];
    const int64_t slot0 = static_cast<int64_t>(source) * max_tokens;
    const int64_t row0 = static_cast<int64_t>(source) * row_stride;
    for (int64_t i = 0; i < s.tokens * topk_; ++i) {
      const int32_t e = local(s.ids[i]);
      if (!is_local(e)) continue;
      const int32_t entry = cursor_[e]++;
      row_index_[entry] = static_cast<int32_t>(row0 + i / topk_);
      entry_slot_[entry] = static_cast<int32_t>(slot0 + i / topk_);
      row_weight_[entry] = s.weights[i];
    }
  }
  // Entries ascend by expert, and within one expert a slot's entries ascend by k.
  const int32_t entries = offsets_[local_experts_];
  for (int32_t entry = 0; entry < entries; ++entry) {
    slot_entries_[slot_cursor_[entry_slot_[entry]]++] = entry;
  }

  out.row_stride = row_stride;
  out.entries = entries;
  out.offsets = offsets_.data();
  out.row_index = row_index_.data();
  out.row_weight = row_weight_.data();
  out.slots = slots;
  out.slot_offsets = slot_offsets_.data();
  out.slot_entries = slot_entries_.data();
}

}  // namespace sortie::exchange
