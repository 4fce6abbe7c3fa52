#include "backends/cpu/isa.h"

#include <fmt/format.h>

#include <cstdlib>

#if SORTIE_HAS_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "backends/cpu/cpuid.h"
#include "backends/cpu/drivers.h"

namespace sortie::cpu {

namespace {

// One line a set: the only list of them.
struct Entry {
  Isa isa;
  std::string_view name;
  const Kernels* kernels;  // null if this build has none
};
#if defined(__x86_64__)
constexpr const Kernels* kAvx2 = &kAvx2Kernels;
constexpr const Kernels* kAvx512bw = &kAvx512bwKernels;
constexpr const Kernels* kAvx512 = &kAvx512Kernels;
#else
constexpr const Kernels* kAvx2 = nullptr;
constexpr const Kernels* kAvx512bw = nullptr;
constexpr const Kernels* kAvx512 = nullptr;
#endif
#if SORTIE_HAS_AMX
constexpr const Kernels* kAmx = &kAmxKernels;
#else
constexpr const Kernels* kAmx = nullptr;
#endif
constexpr Entry kEntries[] = {
    {Isa::kGeneric, "generic", &kGenericKernels},
    {Isa::kAvx2, "avx2", kAvx2},
    {Isa::kAvx512bw, "avx512bw", kAvx512bw},
    {Isa::kAvx512, "avx512", kAvx512},
    {Isa::kAmx, "amx", kAmx},
};

const Entry& entry(Isa isa) { return kEntries[static_cast<size_t>(isa)]; }

// Linux gives a process tiles only once it has asked for them (Documentation/arch/x86/xstate.rst).
bool tiles_granted() {
#if SORTIE_HAS_AMX
  constexpr int kArchReqXcompPerm = 0x1023;
  constexpr int kXtileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXtileData) == 0;
#else
  return false;
#endif
}

constexpr std::string_view kUnverified =
    "compiled, never run on a processor that has it: only SORTIE_ISA=amx chooses it";

std::string all_names() {
  std::string names;
  for (const Entry& e : kEntries) {
    if (!names.empty()) names += e.isa == Isa::kAmx ? " or " : ", ";
    names += e.name;
  }
  return names;
}

}  // namespace

std::span<const Isa> all_isas() {
  static constexpr Isa kAll[] = {Isa::kGeneric, Isa::kAvx2, Isa::kAvx512bw, Isa::kAvx512,
                                 Isa::kAmx};
  static_assert(std::size(kAll) == std::size(kEntries));
  return kAll;
}

std::string_view isa_name(Isa isa) { return entry(isa).name; }

const Kernels& kernels_of(Isa isa) {
  CHECK(entry(isa).kernels != nullptr, "an instruction set that this build does not have");
  return *entry(isa).kernels;
}

std::string isa_missing(Isa isa) {
  static const CpuId kCpu = read_cpuid();
  std::string missing = missing_for(isa, kCpu);
  if (!missing.empty()) return missing;
  if (entry(isa).kernels == nullptr) return "the compiler of this build does not know it";
  if (isa == Isa::kAmx && !tiles_granted()) return "the operating system refuses AMX tiles";
  return {};
}

std::vector<Isa> available_isas() {
  std::vector<Isa> available;
  for (const Isa isa : all_isas()) {
    if (isa_missing(isa).empty()) available.push_back(isa);
  }
  return available;
}

Isa detect_isa() {
  Isa best = Isa::kGeneric;
  for (const Isa isa : all_isas()) {
    if (isa != Isa::kAmx && isa_missing(isa).empty()) best = isa;
  }
  return best;
}

Result<Isa> choose_isa() {
  const char* forced = std::getenv("SORTIE_ISA");
  if (forced == nullptr || *forced == '\0') return detect_isa();
  for (const Entry& e : kEntries) {
    if (e.name != forced) continue;
    const std::string missing = isa_missing(e.isa);
    if (missing.empty()) return e.isa;
    return Status::usage(fmt::format("SORTIE_ISA={}: {}, unset SORTIE_ISA or use {}", forced,
                                     missing, isa_name(detect_isa())));
  }
  return Status::usage(
      fmt::format("SORTIE_ISA={}: unknown instruction set, use {}", forced, all_names()));
}

std::string isa_reason(Isa chosen) {
  const Isa best = detect_isa();
  if (chosen == Isa::kAmx) return fmt::format("amx (SORTIE_ISA asks for it; {})", kUnverified);
  if (chosen != best) {
    return fmt::format("{} (SORTIE_ISA asks for it; {} would run here)", isa_name(chosen),
                       isa_name(best));
  }
  if (best == Isa::kAvx512) return "avx512 (the best verified one, and it runs here)";
  const Isa next = static_cast<Isa>(static_cast<int>(best) + 1);
  return fmt::format("{} (the next better one, {}: {})", isa_name(best), isa_name(next),
                     isa_missing(next));
}

std::string isa_note(Isa isa) {
  const std::string missing = isa_missing(isa);
  std::string note = missing.empty() ? "runs here" : "not here: " + missing;
  if (isa != Isa::kAmx) return note;
  const bool built = entry(isa).kernels != nullptr;
  note += fmt::format("; {}", built ? kUnverified : "not compiled into this build");
  return note;
}

}  // namespace sortie::cpu
