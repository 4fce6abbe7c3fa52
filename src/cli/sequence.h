#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/model.h"

namespace sortie::cli {

// A token sequence with pages of its own, fed to a model by hand: teacher forcing, without the
// engine's scheduler.
class Sequence {
 public:
  // Takes pages [first_page, first_page + pages(length)).
  Sequence(int32_t first_page, int64_t length, int64_t page_size);
  static int64_t pages(int64_t length, int64_t page_size) {
    return (length + page_size - 1) / page_size;
  }

  // Adds rows for the next `ids` to a step, as a prompt chunk or as decode rows; wants the logits
  // of all of them, or of the last alone.
  void append(model::Step& step, std::span<const int32_t> ids, bool prefill, bool all_logits);
  int64_t length() const { return length_; }
  // Pretends that `tokens` positions are in the cache already.
  void skip(int64_t tokens) { length_ += tokens; }

 private:
  std::vector<int32_t> page_table_;
  int64_t length_ = 0;
};

}  // namespace sortie::cli
