#include "cli/bandwidth.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/arena.h"
#include "base/clock.h"
#include "base/threads.h"

namespace sortie::cli {

namespace {

// Eight independent sums, so that the loads and not the additions are what waits.
uint64_t read_all(const uint64_t* p, size_t words) {
  uint64_t sums[8] = {};
  for (size_t i = 0; i + 8 <= words; i += 8) {
    for (size_t j = 0; j < 8; ++j) sums[j] += p[i + j];
  }
  uint64_t total = 0;
  for (const uint64_t s : sums) total += s;
  return total;
}

}  // namespace

double measure_read_bandwidth(int threads) {
  constexpr size_t kBytesPerThread = size_t{192} << 20;
  constexpr int kPasses = 9;
  ThreadPool pool(threads);
  const AlignedBuffer memory(kBytesPerThread * static_cast<size_t>(threads));
  std::vector<uint64_t> sums(static_cast<size_t>(threads) * 8);
  const auto share = [&](int t) {
    return memory.data() + kBytesPerThread * static_cast<size_t>(t);
  };
  pool.run([&](int t, int) { std::memset(share(t), 1, kBytesPerThread); });
  std::vector<double> gbs;
  for (int pass = 0; pass < kPasses; ++pass) {
    const TimePoint start = Clock::now();
    pool.run([&](int t, int) {
      sums[static_cast<size_t>(t) * 8] +=
          read_all(reinterpret_cast<const uint64_t*>(share(t)), kBytesPerThread / 8);
    });
    gbs.push_back(static_cast<double>(memory.size()) / to_seconds(Clock::now() - start) * 1e-9);
  }
  // The sums must be wanted, or the reads would be optimised away.
  static volatile uint64_t sink;
  for (const uint64_t s : sums) sink = sink + s;
  std::nth_element(gbs.begin(), gbs.begin() + kPasses / 2, gbs.end());
  return gbs[kPasses / 2];
}

}  // namespace sortie::cli
