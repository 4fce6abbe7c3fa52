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
  std::vector<int32_t> free_;  // a heap, lowest id on top
};

constexpr int64_t pages_for(int64_t positions, int64_t page_size) {
  return (positions + page_size - 1) / page_size;
}

// Where a request's positions lie: page data()[p / page_size] holds position p. data() moves when
// the table grows, so a step takes it after all growing is done.
class PageTable {
 public:
  // Takes pages until `positions` fit; false if the pool runs out, and then takes none.
  bool grow(PagePool& pool, int64_t positions, int64_t page_size);
  void release(PagePool& pool);
  const int32_t* data() const { return pages_.data(); }
  int64_t size() const { return static_cast<int64_t>(pages_.size()); }

 private:
  std::vector<int32_t> pages_;
};

}  // namespace sortie::kv
