#include "model/weight_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <thread>
#include <vector>

namespace sortie::model {
namespace {

struct Piece {
  std::byte* at;
  int64_t bytes;
};

TEST(WeightMemory, PiecesAreAlignedAndApartFromAnyThread) {
  std::deque<AlignedBuffer> owned;
  WeightMemory memory(owned);
  std::vector<std::vector<Piece>> pieces(4);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < pieces.size(); ++t) {
    threads.emplace_back([&, t] {
      for (int64_t bytes : {1, 100, 3'000'000, 64, 700'000, 1'400'000, 65}) {
        std::byte* at = memory.allocate(bytes);
        std::fill_n(at, bytes, static_cast<std::byte>(t));
        pieces[t].push_back({at, bytes});
      }
    });
  }
  for (std::thread& t : threads) t.join();
  for (size_t t = 0; t < pieces.size(); ++t) {
    for (const Piece& p : pieces[t]) {
      EXPECT_EQ(reinterpret_cast<uintptr_t>(p.at) % 64, 0u);
      EXPECT_EQ(std::count(p.at, p.at + p.bytes, static_cast<std::byte>(t)), p.bytes);
    }
  }
}

// What a model of a few kilobytes holds is one huge page at most; what stands together is on one.
TEST(WeightMemory, BlocksGrowWithWhatIsHeld) {
  std::deque<AlignedBuffer> owned;
  WeightMemory memory(owned);
  const std::byte* a = memory.allocate(1000);
  EXPECT_EQ(memory.allocate(1000), a + 1024);
  ASSERT_EQ(owned.size(), 1u);
  EXPECT_EQ(owned[0].size(), size_t{2} << 20);
  size_t held = 0;
  for (int i = 0; i < 20; ++i) memory.allocate(1'400'000);
  for (const AlignedBuffer& b : owned) held += b.size();
  EXPECT_LE(held, 2u * 20 * 1'400'000 + (size_t{2} << 20));
  EXPECT_LE(owned.size(), 7u);
}

}  // namespace
}  // namespace sortie::model
