#include "base/threads.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace sortie {
namespace {

TEST(ThreadPool, EveryIndexOnceAtAnySize) {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    for (int repeat = 0; repeat < 200; ++repeat) {
      std::vector<int> hits(37, 0);
      pool.parallel_for(37, [&](int64_t i) { ++hits[static_cast<size_t>(i)]; });
      EXPECT_EQ(std::accumulate(hits.begin(), hits.end(), 0), 37);
      for (const int h : hits) EXPECT_EQ(h, 1);
    }
  }
}

TEST(ThreadPool, RunReachesEachThread) {
  ThreadPool pool(3);
  std::vector<int> seen(3, 0);
  pool.run([&](int thread, int threads) {
    EXPECT_EQ(threads, 3);
    seen[static_cast<size_t>(thread)] = 1;
  });
  EXPECT_EQ(seen, std::vector<int>({1, 1, 1}));
}

TEST(Cpus, AtLeastOne) {
  EXPECT_GE(available_cpus(), 1);
  EXPECT_FALSE(allowed_cpus().empty());
}

}  // namespace
}  // namespace sortie
