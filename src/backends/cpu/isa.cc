#include "backends/cpu/isa.h"

#include <fmt/format.h>

#include <array>
#include <cstdlib>
#include <utility>

namespace sortie::cpu {

namespace {

// The names of what kAvx512 needs and this processor or system lacks.
std::string missing_for_avx512() {
#if defined(__x86_64__)
  // __builtin_cpu_supports takes literals only; it also asks whether the system saves the state.
  const std::array<std::pair<std::string_view, bool>, 9> needed = {{
      {"avx512f", __builtin_cpu_supports("avx512f") != 0},
      {"avx512bw", __builtin_cpu_supports("avx512bw") != 0},
      {"avx512vl", __builtin_cpu_supports("avx512vl") != 0},
      {"avx512dq", __builtin_cpu_supports("avx512dq") != 0},
      {"avx512vnni", __builtin_cpu_supports("avx512vnni") != 0},
      {"avx512bf16", __builtin_cpu_supports("avx512bf16") != 0},
      {"avx512vbmi", __builtin_cpu_supports("avx512vbmi") != 0},
      {"avx2", __builtin_cpu_supports("avx2") != 0},
      {"fma", __builtin_cpu_supports("fma") != 0},
  }};
  std::string missing;
  for (const auto& [name, there] : needed) {
    if (there) continue;
    if (!missing.empty()) missing += ", ";
    missing += name;
  }
  return missing;
#else
  return "an x86-64 processor";
#endif
}

}  // namespace

std::string_view isa_name(Isa isa) { return isa == Isa::kAvx512 ? "avx512" : "generic"; }

Isa detect_isa() { return missing_for_avx512().empty() ? Isa::kAvx512 : Isa::kGeneric; }

Result<Isa> choose_isa() {
  const char* forced = std::getenv("SORTIE_ISA");
  if (forced == nullptr || *forced == '\0') return detect_isa();
  const std::string_view name = forced;
  if (name == isa_name(Isa::kGeneric)) return Isa::kGeneric;
  if (name != isa_name(Isa::kAvx512)) {
    return Status::usage(
        fmt::format("SORTIE_ISA={}: unknown instruction set, use generic or avx512", name));
  }
  if (const std::string missing = missing_for_avx512(); !missing.empty()) {
    return Status::usage(fmt::format(
        "SORTIE_ISA=avx512: this processor lacks {}, unset SORTIE_ISA or use generic", missing));
  }
  return Isa::kAvx512;
}

std::string isa_reason(Isa chosen) {
  if (chosen == Isa::kAvx512) return "avx512 (F, BW, VL, DQ, VNNI, BF16, VBMI found)";
  const std::string missing = missing_for_avx512();
  return missing.empty() ? "generic (SORTIE_ISA asks for it; avx512 would run here)"
                         : fmt::format("generic (avx512 needs {})", missing);
}

}  // namespace sortie::cpu
