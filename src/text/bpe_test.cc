#include "text/bpe.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

namespace sortie::text {
namespace {

std::array<int32_t, 256> identity() {
  std::array<int32_t, 256> ids{};
  for (int b = 0; b < 256; ++b) ids[static_cast<size_t>(b)] = b;
  return ids;
}

// The rule as it is written down: find the pair of lowest rank, merge its leftmost place, repeat.
std::vector<int32_t> by_definition(const std::string& word, const std::vector<Bpe::Merge>& merges) {
  std::map<std::pair<int32_t, int32_t>, std::pair<int32_t, int32_t>> ranks;
  for (const auto& [left, right, result, rank] : merges) ranks[{left, right}] = {rank, result};
  std::vector<int32_t> ids;
  for (const char c : word) ids.push_back(static_cast<uint8_t>(c));
  for (;;) {
    int32_t best = INT32_MAX;
    size_t at = 0;
    for (size_t i = 0; i + 1 < ids.size(); ++i) {
      const auto it = ranks.find({ids[i], ids[i + 1]});
      if (it != ranks.end() && it->second.first < best) {
        best = it->second.first;
        at = i;
      }
    }
    if (best == INT32_MAX) return ids;
    ids[at] = ranks[{ids[at], ids[at + 1]}].second;
    ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(at) + 1);
  }
}

TEST(Bpe, AgreesWithTheDefinitionOnRandomTablesAndWords) {
  std::mt19937 random(7);
  for (int table = 0; table < 200; ++table) {
    std::vector<Bpe::Merge> merges;
    std::vector<int32_t> symbols = {'a', 'b', 'c'};
    for (int32_t i = 0; i < 30; ++i) {
      const int32_t left = symbols[random() % symbols.size()];
      const int32_t right = symbols[random() % symbols.size()];
      merges.push_back({left, right, 256 + i, table % 2 == 0 ? i : i / 3});  // or shared ranks
      symbols.push_back(256 + i);
    }
    const Bpe bpe(identity(), merges);
    Bpe::Scratch scratch;
    for (int word = 0; word < 20; ++word) {
      std::string text;
      for (size_t n = random() % 40; n > 0; --n) text += static_cast<char>('a' + random() % 3);
      std::vector<int32_t> ids;
      bpe.encode(text, scratch, ids);
      ASSERT_EQ(ids, by_definition(text, merges)) << text;
    }
  }
}

TEST(Bpe, ALongRunWithoutASplitIsNotQuadratic) {
  const Bpe bpe(identity(), {{'a', 'a', 256, 0}, {256, 256, 257, 1}, {257, 257, 258, 2}});
  Bpe::Scratch scratch;
  std::vector<int32_t> ids;
  bpe.encode(std::string(1 << 19, 'a'), scratch, ids);  // n^2 steps would take minutes
  EXPECT_EQ(ids, std::vector<int32_t>((1 << 19) / 8, 258));
}

}  // namespace
}  // namespace sortie::text
