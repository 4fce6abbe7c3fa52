#include "base/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <new>

namespace sortie {

namespace {
constexpr size_t kAlign = 64;
constexpr size_t kDeviceAlign = 256;
constexpr size_t kMinBlock = size_t{1} << 20;

constexpr size_t kHugePage = size_t{2} << 20;

size_t round_up(size_t n, size_t align) { return (n + align - 1) / align * align; }

// Large pieces ask for huge pages, which systems grant to who asks: weights are read from end to
// end, and with small pages walks through the page table are a good part of that (docs/cpu.md).
// Null if there is no memory.
std::byte* host_memory(size_t bytes) {
  const bool large = bytes >= kHugePage;
  void* p = nullptr;
  if (posix_memalign(&p, large ? kHugePage : kAlign, bytes) != 0) return nullptr;
  if (large) madvise(p, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
  return static_cast<std::byte*>(p);
}
}  // namespace

void AlignedBuffer::Free::operator()(std::byte* p) const {
  memory != nullptr ? memory->release(p) : std::free(p);
}

AlignedBuffer::AlignedBuffer(size_t bytes, const Memory* memory) : size_(bytes) {
  if (bytes == 0) return;
  std::byte* p = memory != nullptr ? memory->allocate(bytes) : host_memory(bytes);
  if (p == nullptr) throw std::bad_alloc();
  data_ = {p, Free{memory}};
}

std::byte* Arena::alloc_bytes(size_t bytes) {
  bytes = round_up(std::max<size_t>(bytes, 1), memory_ != nullptr ? kDeviceAlign : kAlign);
  while (block_ < blocks_.size() && used_ + bytes > blocks_[block_].size()) {
    ++block_;
    used_ = 0;
  }
  if (block_ == blocks_.size()) {
    const size_t last = blocks_.empty() ? kMinBlock : blocks_.back().size();
    blocks_.emplace_back(std::max(bytes, last * 2), memory_);
    used_ = 0;
  }
  std::byte* p = blocks_[block_].data() + used_;
  used_ += bytes;
  return p;
}

void Arena::reset() {
  if (blocks_.size() > 1) {
    size_t total = 0;
    for (const AlignedBuffer& b : blocks_) total += b.size();
    blocks_.clear();
    blocks_.emplace_back(total, memory_);
  }
  block_ = 0;
  used_ = 0;
}

}  // namespace sortie
