#include "cli/sequence.h"

#include <numeric>

namespace sortie::cli {

Sequence::Sequence(int32_t first_page, int64_t length, int64_t page_size)
    : page_table_(static_cast<size_t>(pages(length, page_size))) {
  std::iota(page_table_.begin(), page_table_.end(), first_page);
}

void Sequence::append(model::Step& step, std::span<const int32_t> ids, bool prefill,
                      bool all_logits) {
  const auto first = static_cast<int64_t>(step.ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    if (all_logits || i + 1 == ids.size()) {
      step.logit_rows.push_back(static_cast<int32_t>(step.ids.size()));
    }
    step.ids.push_back(ids[i]);
    step.positions.push_back(static_cast<int32_t>(length_++));
  }
  step.segments.push_back({.first_row = first,
                           .rows = static_cast<int64_t>(ids.size()),
                           .prefill = prefill,
                           .page_table = page_table_.data()});
  step.any_prefill_anywhere = step.any_prefill_anywhere || prefill;
}

}  // namespace sortie::cli
