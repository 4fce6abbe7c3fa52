#include "base/arena.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace sortie {
namespace {

TEST(Arena, AlignsAndKeepsPointersWhileItGrows) {
  Arena arena;
  auto* a = arena.alloc<float>(3);
  auto* b = arena.alloc<float>(int64_t{1} << 20);
  a[2] = 1.0f;
  b[0] = 2.0f;
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a) % 64, 0u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(b) % 64, 0u);
  EXPECT_EQ(a[2], 1.0f);
}

TEST(Arena, ReusesTheSameMemoryOnceItKnowsTheStep) {
  Arena arena;
  const auto step = [&] {
    arena.reset();
    std::byte* first = arena.alloc_bytes(1000);
    arena.alloc_bytes(5'000'000);
    return first;
  };
  step();
  std::byte* second = step();
  EXPECT_EQ(second, step());
}

TEST(Arena, ScopeGivesBack) {
  Arena arena;
  std::byte* before = nullptr;
  {
    Arena::Scope scope(arena);
    before = arena.alloc_bytes(64);
  }
  EXPECT_EQ(before, arena.alloc_bytes(64));
}

TEST(AlignedBuffer, LargePiecesStandWhereHugePagesCan) {
  const AlignedBuffer large((size_t{5} << 20) + 13);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(large.data()) % (2 << 20), 0u);
  large.data()[large.size() - 1] = std::byte{1};
  const AlignedBuffer small(1);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(small.data()) % 64, 0u);
}

}  // namespace
}  // namespace sortie
