#include "backends/cpu/probe.h"

#include <atomic>

#include "backends/cpu/drivers.h"
#include "base/clock.h"

namespace sortie::cpu {

Arithmetic arithmetic_of(quant::Format format, Isa isa) {
  if (isa == Isa::kGeneric) return Arithmetic::kF32;
  switch (format) {
    case quant::Format::kFp8Block:
    case quant::Format::kW4Afp8:
      return isa < Isa::kAvx512 ? Arithmetic::kF32 : Arithmetic::kBf16;
    case quant::Format::kW8A8Int8:
      return Arithmetic::kInt8;
    default:
      return Arithmetic::kF32;
  }
}

double read_gbs(Isa isa, ThreadPool& threads, const std::byte* p, int64_t bytes) {
  const Kernels& k = kernels_of(isa);
  std::atomic<uint64_t> sink{0};  // what is read must be wanted
  const TimePoint start = Clock::now();
  threads.run([&](int thread, int of) {
    const Share share = share_of(bytes / 4096, thread, of);
    sink += k.read(p + share.begin * 4096, (share.end - share.begin) * 4096);
  });
  return static_cast<double>(bytes) / to_seconds(Clock::now() - start) * 1e-9;
}

double peak_gops(Isa isa, ThreadPool& threads, Arithmetic arithmetic, double seconds) {
  const Kernels& k = kernels_of(isa);
  std::atomic<int64_t> operations{0};
  const TimePoint start = Clock::now();
  threads.run([&](int, int) {
    int64_t done = 0;
    while (to_seconds(Clock::now() - start) < seconds) {
      done += k.multiply(static_cast<int>(arithmetic), 20000);
    }
    operations += done;
  });
  return static_cast<double>(operations) / to_seconds(Clock::now() - start) * 1e-9;
}

}  // namespace sortie::cpu
