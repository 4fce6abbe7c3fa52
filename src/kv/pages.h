#pragma once

#include <cstdint>
#include <vector>

#include "base/check.h"

namespace sortie::kv {

// The pages of one rank's latent cache: a free list with reference counts. A page holds page_size
// positions of every layer. Ids are handed out lowest first, so a run is repeatable.
class PagePool {
 public:
  explicit PagePool(int32_t pages);
  // -1 if none is free.
  int32_t take();
  void add_reference(int32_t page);
  void release(int32_t page);
  int32_t free_pages() const { return static_cast<int32_t>(free_.size()); }
  int32_t pages() const { return static_cast<int32_t>(references_.size()); }

 private:
  std::vector<int32_t> references_;
  std::vector<int32_t> free_;
};

}  // namespace sortie::kv
