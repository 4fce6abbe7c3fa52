#pragma once

#include <cstdint>
#include <string>

#include "backends/cpu/isa.h"

// What an x86-64 processor says about itself, and what each set needs of it (Intel SDM volume 2,
// CPUID; volume 1, chapter 13 for XCR0).
namespace sortie::cpu {

struct CpuId {
  uint32_t leaf1_ecx = 0;
  uint32_t leaf7_ebx = 0;
  uint32_t leaf7_ecx = 0;
  uint32_t leaf7_edx = 0;
  uint32_t leaf7_1_eax = 0;
  uint64_t xcr0 = 0;  // the registers that the system saves; 0 without OSXSAVE
};

// Of this processor; zeros elsewhere than on x86-64.
CpuId read_cpuid();

// As isa_missing, for any processor: CPUID and XCR0 alone.
std::string missing_for(Isa isa, const CpuId& cpu);

}  // namespace sortie::cpu
