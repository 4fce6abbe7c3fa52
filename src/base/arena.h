#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/check.h"

namespace sortie {

// Where memory comes from if it is not the host's own.
struct Memory {
  std::byte* (*allocate)(size_t bytes);  // at least 256-byte aligned; null if there is none
  void (*release)(std::byte*);
};

// Uninitialised memory, 64-byte aligned, of fixed size; the host's if `memory` is null. Pieces of
// 2 MiB and more are on huge pages where the system allows that.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(size_t bytes, const Memory* memory = nullptr);
  std::byte* data() const { return data_.get(); }
  size_t size() const { return size_; }

 private:
  struct Free {
    const Memory* memory;  // null: the host's
    void operator()(std::byte* p) const;
  };
  std::unique_ptr<std::byte, Free> data_;
  size_t size_ = 0;
};

// Scratch memory of one step: bump allocation, 64-byte aligned (256 on a device), never freed one
// by one. It grows in blocks while it learns what a step needs; reset() merges them, so a steady
// step allocates nothing.
class Arena {
 public:
  explicit Arena(const Memory* memory = nullptr) : memory_(memory) {}

  template <typename T>
  T* alloc(int64_t count) {
    CHECK(count >= 0);
    return reinterpret_cast<T*>(alloc_bytes(static_cast<size_t>(count) * sizeof(T)));
  }
  std::byte* alloc_bytes(size_t bytes);

  // Forgets everything allocated since construction or the last reset.
  void reset();

  // Marks allow a function to give its scratch back: { Arena::Scope scope(arena); … }
  class Scope {
   public:
    explicit Scope(Arena& arena) : arena_(arena), block_(arena.block_), used_(arena.used_) {}
    ~Scope() {
      arena_.block_ = block_;
      arena_.used_ = used_;
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Arena& arena_;
    size_t block_;
    size_t used_;
  };

 private:
  const Memory* memory_;
  std::vector<AlignedBuffer> blocks_;
  size_t block_ = 0;  // index of the block in use
  size_t used_ = 0;   // bytes used of it
};

}  // namespace sortie
