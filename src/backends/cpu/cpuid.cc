#include "backends/cpu/cpuid.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <fmt/format.h>

namespace sortie::cpu {

namespace {

struct Feature {
  const char* name;
  uint32_t CpuId::*word;
  int bit;
  Isa first;  // the plainest set that needs it; all later ones do too
};
constexpr Feature kFeatures[] = {
    {"fma", &CpuId::leaf1_ecx, 12, Isa::kAvx2},
    {"f16c", &CpuId::leaf1_ecx, 29, Isa::kAvx2},
    {"avx2", &CpuId::leaf7_ebx, 5, Isa::kAvx2},
    {"avx512f", &CpuId::leaf7_ebx, 16, Isa::kAvx512bw},
    {"avx512dq", &CpuId::leaf7_ebx, 17, Isa::kAvx512bw},
    {"avx512bw", &CpuId::leaf7_ebx, 30, Isa::kAvx512bw},
    {"avx512vl", &CpuId::leaf7_ebx, 31, Isa::kAvx512bw},
    {"avx512vbmi", &CpuId::leaf7_ecx, 1, Isa::kAvx512},
    {"avx512vnni", &CpuId::leaf7_ecx, 11, Isa::kAvx512},
    {"avx512bf16", &CpuId::leaf7_1_eax, 5, Isa::kAvx512},
    {"amx-tile", &CpuId::leaf7_edx, 24, Isa::kAmx},
    {"amx-int8", &CpuId::leaf7_edx, 25, Isa::kAmx},
    {"amx-bf16", &CpuId::leaf7_edx, 22, Isa::kAmx},
};

struct Registers {
  const char* name;
  uint64_t mask;  // of XCR0
  Isa first;
};
constexpr Registers kRegisters[] = {
    {"AVX", 0x6, Isa::kAvx2},
    {"AVX-512", 0xe6, Isa::kAvx512bw},
    {"AMX", 0x600e6, Isa::kAmx},
};

}  // namespace

CpuId read_cpuid() {
  CpuId cpu;
#if defined(__x86_64__)
  uint32_t eax = 0;
  uint32_t ebx = 0;
  uint32_t ecx = 0;
  uint32_t edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0) {
    cpu.leaf1_ecx = ecx;
    const bool osxsave = ((ecx >> 27) & 1U) != 0;  // without it xgetbv is an illegal instruction
    if (osxsave) {
      uint32_t low = 0;
      uint32_t high = 0;
      asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
      cpu.xcr0 = uint64_t{high} << 32 | low;
    }
  }
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0) {
    cpu.leaf7_ebx = ebx;
    cpu.leaf7_ecx = ecx;
    cpu.leaf7_edx = edx;
    const uint32_t subleaves = eax;
    if (subleaves >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0)
      cpu.leaf7_1_eax = eax;
  }
#endif
  return cpu;
}

std::string missing_for(Isa isa, const CpuId& cpu) {
#if defined(__x86_64__)
  std::string lacks;
  for (const Feature& f : kFeatures) {
    if (f.first > isa || ((cpu.*f.word >> f.bit) & 1U) != 0) continue;
    lacks += lacks.empty() ? "" : ", ";
    lacks += f.name;
  }
  if (!lacks.empty()) return "this processor lacks " + lacks;
  for (const Registers& r : kRegisters) {
    if (r.first > isa || (cpu.xcr0 & r.mask) == r.mask) continue;
    return fmt::format("the operating system does not save {} registers (XCR0 is {:#x})", r.name,
                       cpu.xcr0);
  }
  return {};
#else
  static_cast<void>(cpu);
  return isa == Isa::kGeneric ? "" : "this is no x86-64 processor";
#endif
}

}  // namespace sortie::cpu
