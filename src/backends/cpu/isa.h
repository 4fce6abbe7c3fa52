#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "ops/ops.h"

// The CPU backend: one driver an op (tiles, threads), and micro-kernels per instruction set that
// are chosen once, at run time. Linear sums differ between sets in their last bits; within one set
// a row's bits depend on nothing but the row and the weights.
namespace sortie::cpu {

enum class Isa : uint8_t {
  kGeneric,   // plain C++: any processor
  kAvx2,      // AVX2, FMA, F16C: Haswell, Zen 1 and later
  kAvx512bw,  // AVX-512 F, BW, VL, DQ: Skylake-SP and later
  kAvx512,    // with VNNI, BF16, VBMI too: Zen 4, Sapphire Rapids and later
  kAmx,       // kAvx512 and int8 and bf16 tiles: Sapphire Rapids and later
};

// Every set that Sortie knows, the plainest first: what tests and doctor go through.
std::span<const Isa> all_isas();

// "avx2": as SORTIE_ISA and reports call it.
std::string_view isa_name(Isa isa);

// What keeps a set from running here, a clause such as "this processor lacks avx2"; empty if
// nothing does. For kAmx it asks the system for the tiles, which it must before they are used.
std::string isa_missing(Isa isa);

// The sets of all_isas() that run here.
std::vector<Isa> available_isas();

// The best set that runs here and was verified on a processor: never kAmx.
Isa detect_isa();

// SORTIE_ISA=<name> where set, or detect_isa().
Result<Isa> choose_isa();

// One line for doctor: which set is used and why.
std::string isa_reason(Isa chosen);

// One line for doctor about any set: whether it would run here, or what is missing.
std::string isa_note(Isa isa);

const ops::Backend& backend(Isa isa);

}  // namespace sortie::cpu
