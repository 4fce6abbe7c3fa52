#include "base/numa.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <set>
#include <string>

#include "base/arena.h"
#include "base/threads.h"

namespace sortie {
namespace {

std::vector<int> range(int first, int count) {
  std::vector<int> v(static_cast<size_t>(count));
  std::iota(v.begin(), v.end(), first);
  return v;
}

using Cpus = std::vector<int>;

TEST(PlaceRanks, NeighboursShareANode) {
  const std::vector<NumaNode> nodes = {{0, range(0, 4)}, {1, range(4, 4)}};
  const auto places = place_ranks(nodes, range(0, 8), 4, 2);
  ASSERT_EQ(places.size(), 4u);
  EXPECT_EQ(places[0].cpus, (Cpus{0, 1}));
  EXPECT_EQ(places[1].cpus, (Cpus{2, 3}));
  EXPECT_EQ(places[2].cpus, (Cpus{4, 5}));
  EXPECT_EQ(places[3].cpus, (Cpus{6, 7}));
  EXPECT_EQ(places[1].node, 0);
  EXPECT_EQ(places[2].node, 1);
}

TEST(PlaceRanks, NumbersThatAlternateBetweenNodesAreSorted) {
  const std::vector<NumaNode> nodes = {{0, {0, 2, 4, 6}}, {1, {1, 3, 5, 7}}};
  const auto places = place_ranks(nodes, range(0, 8), 2, 3);
  EXPECT_EQ(places[0].cpus, (Cpus{0, 2, 4}));
  EXPECT_EQ(places[1].cpus, (Cpus{1, 3, 5}));
}

TEST(PlaceRanks, OneNodeIsCutInOrder) {
  const auto places = place_ranks({{0, range(0, 6)}}, {0, 1, 3, 5}, 2, 2);
  EXPECT_EQ(places[0].cpus, (Cpus{0, 1}));
  EXPECT_EQ(places[1].cpus, (Cpus{3, 5}));
  EXPECT_EQ(places[1].node, 0);
}

TEST(PlaceRanks, ASystemThatNamesNoNodesIsCutInOrderToo) {
  const auto places = place_ranks({}, range(0, 4), 2, 2);
  EXPECT_EQ(places[1].cpus, (Cpus{2, 3}));
  EXPECT_EQ(places[1].node, -1);
}

TEST(PlaceRanks, AFullNodesRankGoesToTheEmptiest) {
  const std::vector<NumaNode> nodes = {{0, range(0, 2)}, {1, range(2, 6)}};
  const auto places = place_ranks(nodes, range(0, 8), 4, 2);
  EXPECT_EQ(places[0].node, 0);
  for (size_t r = 1; r < 4; ++r) EXPECT_EQ(places[r].node, 1) << r;
}

TEST(PlaceRanks, ARankThatNoNodeHoldsIsSpreadAndHasNone) {
  const std::vector<NumaNode> nodes = {{0, range(0, 3)}, {1, range(3, 3)}};
  const auto places = place_ranks(nodes, range(0, 6), 3, 2);
  EXPECT_EQ(places[0].cpus, (Cpus{0, 1}));
  EXPECT_EQ(places[1].cpus, (Cpus{3, 4}));
  EXPECT_EQ(places[2].cpus, (Cpus{2, 5}));
  EXPECT_EQ(places[2].node, -1);
}

TEST(PlaceRanks, ASingleRankStaysOnANodeThatHoldsIt) {
  const std::vector<NumaNode> nodes = {{0, range(0, 4)}, {1, range(4, 4)}};
  EXPECT_EQ(place_ranks(nodes, range(0, 8), 1, 3)[0].cpus, (Cpus{0, 1, 2}));
  EXPECT_EQ(place_ranks(nodes, range(0, 8), 1, 8)[0].node, -1);
  // A launcher that gave the process one node's CPUs has placed it already.
  const RankPlace placed = place_ranks(nodes, range(4, 4), 1, 4)[0];
  EXPECT_TRUE(placed.cpus.empty());
  EXPECT_EQ(placed.node, 1);
}

TEST(PlaceRanks, MoreThreadsThanCpusPinNothing) {
  const std::vector<NumaNode> nodes = {{0, range(0, 2)}, {1, range(2, 2)}};
  for (const RankPlace& p : place_ranks(nodes, range(0, 4), 2, 3)) {
    EXPECT_TRUE(p.cpus.empty());
    EXPECT_EQ(p.node, -1);
  }
}

// Whatever the machine: no CPU twice, none that is not allowed, each rank whole, and a rank that
// has a node has no CPU of another.
TEST(PlaceRanks, HoldsForAllSmallMachines) {
  for (int a = 0; a <= 5; ++a) {
    for (int b = 0; b <= 5; ++b) {
      const std::vector<NumaNode> nodes = {{0, range(0, a)}, {3, range(a, b)}};
      const std::vector<int> allowed = range(0, a + b + 2);  // two of no node
      for (int ranks = 1; ranks <= 4; ++ranks) {
        for (int threads = 1; threads <= 4; ++threads) {
          std::set<int> used;
          const auto places = place_ranks(nodes, allowed, ranks, threads);
          ASSERT_EQ(places.size(), static_cast<size_t>(ranks));
          const bool one_node = a + b == 0;
          const bool pins = ranks * threads <= std::ssize(allowed) && (ranks > 1 || !one_node);
          for (const RankPlace& p : places) {
            ASSERT_EQ(p.cpus.size(), pins ? static_cast<size_t>(threads) : 0u);
            for (const int cpu : p.cpus) {
              EXPECT_TRUE(used.insert(cpu).second);
              EXPECT_LT(cpu, a + b + 2);
              EXPECT_TRUE(p.node != 0 || cpu < a);
              EXPECT_TRUE(p.node != 3 || (cpu >= a && cpu < a + b));
            }
          }
        }
      }
    }
  }
}

TEST(NumaNodes, AreReadAsTheKernelWritesThem) {
  const std::filesystem::path root = std::filesystem::path(testing::TempDir()) / "numa_nodes";
  const auto write = [&](const std::string& name, const std::string& text) {
    const auto path = root / "sys/devices/system/node" / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  };
  write("online", "0-2,4\n");
  write("node0/cpulist", "0-1,8-9\n");
  write("node1/cpulist", "\n");  // memory without CPUs
  write("node2/cpulist", "2-3\n");
  write("node4/cpulist", "4,x-9\n");
  const auto nodes = numa_nodes(root.string());
  std::filesystem::remove_all(root);
  ASSERT_EQ(nodes.size(), 3u);
  EXPECT_EQ(nodes[0].cpus, (Cpus{0, 1, 8, 9}));
  EXPECT_EQ(nodes[1].id, 2);
  EXPECT_EQ(nodes[2].cpus, (Cpus{4}));
  EXPECT_TRUE(numa_nodes("/nowhere").empty());
}

TEST(PreferNode, KeepsTheMemoryAndItsContents) {
  const AlignedBuffer buffer(1 << 20);
  std::fill_n(buffer.data(), buffer.size(), std::byte{7});
  // A container may forbid the call; either way the memory is as before.
  const std::vector<NumaNode> nodes = numa_nodes();
  prefer_node(buffer.data() + 5, buffer.size() - 9, nodes.empty() ? 0 : nodes[0].id);
  EXPECT_EQ(std::count(buffer.data(), buffer.data() + buffer.size(), std::byte{7}), 1 << 20);
  EXPECT_FALSE(prefer_node(buffer.data(), buffer.size(), -1));
  EXPECT_FALSE(prefer_node(buffer.data(), buffer.size(), 1023));
}

}  // namespace
}  // namespace sortie
