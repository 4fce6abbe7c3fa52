#include "kv/pages.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace sortie::kv {

PagePool::PagePool(int32_t pages)
    : references_(static_cast<size_t>(pages), 0), free_(static_cast<size_t>(pages)) {
  std::iota(free_.begin(), free_.end(), 0);  // ascending is a heap already
}

int32_t PagePool::take() {
  if (free_.empty()) return -1;
  std::pop_heap(free_.begin(), free_.end(), std::greater<>());
  const int32_t page = free_.back();
  free_.pop_back();
  references_[static_cast<size_t>(page)] = 1;
  return page;
}

void PagePool::add_reference(int32_t page) {
  CHECK(page >= 0 && page < pages() && references_[static_cast<size_t>(page)] > 0);
  ++references_[static_cast<size_t>(page)];
}

void PagePool::release(int32_t page) {
  CHECK(page >= 0 && page < pages() && references_[static_cast<size_t>(page)] > 0);
  if (--references_[static_cast<size_t>(page)] > 0) return;
  free_.push_back(page);
  std::push_heap(free_.begin(), free_.end(), std::greater<>());
}

bool PageTable::grow(PagePool& pool, int64_t positions, int64_t page_size) {
  const int64_t missing = pages_for(positions, page_size) - size();
  if (missing > pool.free_pages()) return false;
  for (int64_t i = 0; i < missing; ++i) pages_.push_back(pool.take());
  return true;
}

void PageTable::release(PagePool& pool) {
  for (const int32_t page : pages_) pool.release(page);
  pages_.clear();
}

}  // namespace sortie::kv
