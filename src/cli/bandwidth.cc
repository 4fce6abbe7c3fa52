#include "cli/bandwidth.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "backends/cpu/isa.h"
#include "backends/cpu/probe.h"
#include "base/arena.h"
#include "base/threads.h"

namespace sortie::cli {

double measure_read_bandwidth(int threads) {
  constexpr size_t kBytesPerThread = size_t{192} << 20;
  constexpr int kPasses = 9;
  threads = std::max(1, threads);
  ThreadPool pool(threads);
  const AlignedBuffer memory(kBytesPerThread * static_cast<size_t>(threads));
  pool.run([&](int t, int) {
    std::memset(memory.data() + kBytesPerThread * static_cast<size_t>(t), 1, kBytesPerThread);
  });
  std::vector<double> gbs(kPasses);
  for (double& pass : gbs) {
    pass =
        cpu::read_gbs(cpu::detect_isa(), pool, memory.data(), static_cast<int64_t>(memory.size()));
  }
  std::nth_element(gbs.begin(), gbs.begin() + kPasses / 2, gbs.end());
  return gbs[kPasses / 2];
}

}  // namespace sortie::cli
