#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cpu/isa.h"

// What this machine can do at most, measured in this process: the denominators of benchmarks.
namespace sortie::cpu {

// The instruction that a format's products come from.
enum class Arithmetic : uint8_t { kF32, kBf16, kInt8 };
Arithmetic arithmetic_of(quant::Format format, Isa isa);

// Reads [p, p + bytes) once from every thread's share, one sequential stream a thread; GB/s.
double read_gbs(Isa isa, ThreadPool& threads, const std::byte* p, int64_t bytes);

// Multiplications and additions on registers alone, all threads; Gop/s over about `seconds`.
double peak_gops(Isa isa, ThreadPool& threads, Arithmetic arithmetic, double seconds);

}  // namespace sortie::cpu
