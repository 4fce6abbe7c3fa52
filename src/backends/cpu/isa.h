#pragma once

#include <string>
#include <string_view>

#include "base/status.h"
#include "ops/ops.h"

// The CPU backend: one driver an op (tiles, threads), and micro-kernels per instruction set that
// are chosen once, at run time. Linear sums differ between sets in their last bits; within one set
// a row's bits depend on nothing but the row and the weights.
namespace sortie::cpu {

enum class Isa : uint8_t {
  kGeneric,  // plain C++: any processor
  kAvx512,   // AVX-512 F, BW, VL, DQ, VNNI, BF16, VBMI: Zen 4, Sapphire Rapids and later
};

std::string_view isa_name(Isa isa);

// The best set that this processor has.
Isa detect_isa();

// SORTIE_ISA=generic|avx512 where set, or detect_isa().
Result<Isa> choose_isa();

// One line for doctor: which set is used, and what is missing for a better one.
std::string isa_reason(Isa chosen);

const ops::Backend& backend(Isa isa);

}  // namespace sortie::cpu
