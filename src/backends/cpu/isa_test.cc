#include "backends/cpu/cpuid.h"
#include "backends/cpu/test_support.h"

namespace sortie::cpu {
namespace {

constexpr uint64_t kAvxSaved = 0x7;
constexpr uint64_t kAvx512Saved = 0xe7;
constexpr uint64_t kAmxSaved = 0x600e7;

// The words as Intel's and AMD's manuals give them for these cores (the bits that matter here).
constexpr uint32_t kLeaf1 = 1U << 12 | 1U << 27 | 1U << 28 | 1U << 29;  // FMA OSXSAVE AVX F16C
constexpr uint32_t kAvx2Bit = 1U << 5;
constexpr uint32_t kSkylake = kAvx2Bit | 1U << 16 | 1U << 17 | 1U << 30 | 1U << 31;
constexpr CpuId kNehalem{};
constexpr CpuId kHaswell{.leaf1_ecx = kLeaf1, .leaf7_ebx = kAvx2Bit, .xcr0 = kAvxSaved};
constexpr CpuId kSkylakeSp{.leaf1_ecx = kLeaf1, .leaf7_ebx = kSkylake, .xcr0 = kAvx512Saved};
constexpr CpuId kZen4{.leaf1_ecx = kLeaf1,
                      .leaf7_ebx = kSkylake,
                      .leaf7_ecx = 1U << 1 | 1U << 11,
                      .leaf7_1_eax = 1U << 5,
                      .xcr0 = kAvx512Saved};
constexpr CpuId kSapphireRapids{.leaf1_ecx = kLeaf1,
                                .leaf7_ebx = kSkylake,
                                .leaf7_ecx = 1U << 1 | 1U << 11,
                                .leaf7_edx = 1U << 22 | 1U << 24 | 1U << 25,
                                .leaf7_1_eax = 1U << 5,
                                .xcr0 = kAmxSaved};

#if defined(__x86_64__)
TEST(CpuId, EachProcessorRunsItsSetsAndNoOther) {
  const std::pair<CpuId, Isa> best[] = {{kNehalem, Isa::kGeneric},
                                        {kHaswell, Isa::kAvx2},
                                        {kSkylakeSp, Isa::kAvx512bw},
                                        {kZen4, Isa::kAvx512},
                                        {kSapphireRapids, Isa::kAmx}};
  for (const auto& [cpu, most] : best) {
    for (const Isa isa : all_isas()) EXPECT_EQ(missing_for(isa, cpu).empty(), isa <= most);
  }
}

TEST(CpuId, WhatIsMissingIsNamed) {
  EXPECT_EQ(missing_for(Isa::kAvx2, kNehalem), "this processor lacks fma, f16c, avx2");
  EXPECT_EQ(missing_for(Isa::kAvx512, kSkylakeSp),
            "this processor lacks avx512vbmi, avx512vnni, avx512bf16");
  CpuId cpu = kZen4;
  cpu.xcr0 = kAvxSaved;
  EXPECT_EQ(missing_for(Isa::kAvx2, cpu), "");
  EXPECT_EQ(missing_for(Isa::kAvx512bw, cpu),
            "the operating system does not save AVX-512 registers (XCR0 is 0x7)");
  cpu = kSapphireRapids;
  cpu.xcr0 = kAvx512Saved;
  EXPECT_EQ(missing_for(Isa::kAmx, cpu),
            "the operating system does not save AMX registers (XCR0 is 0xe7)");
}

// The compiler's own opinion of this processor.
TEST(CpuId, AgreesWithTheCompilersRuntime) {
  const CpuId cpu = read_cpuid();
  EXPECT_EQ(missing_for(Isa::kAvx2, cpu).empty(),
            __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"));
  EXPECT_EQ(missing_for(Isa::kAvx512bw, cpu).empty(), __builtin_cpu_supports("avx512bw") &&
                                                          __builtin_cpu_supports("avx512dq") &&
                                                          __builtin_cpu_supports("avx512vl"));
  EXPECT_EQ(missing_for(Isa::kAvx512, cpu).empty(), __builtin_cpu_supports("avx512vnni") &&
                                                        __builtin_cpu_supports("avx512bf16") &&
                                                        __builtin_cpu_supports("avx512vbmi"));
}
#endif

TEST(ChooseIsa, TheEnvironmentForcesOneOrIsRefusedInASentence) {
  for (const Isa isa : all_isas()) {
    ASSERT_EQ(setenv("SORTIE_ISA", std::string(isa_name(isa)).c_str(), 1), 0);
    const Result<Isa> forced = choose_isa();
    const std::string missing = isa_missing(isa);
    if (missing.empty()) {
      EXPECT_EQ(forced.value(), isa);
      EXPECT_EQ(isa_reason(isa).rfind(isa_name(isa), 0), 0U);
    } else {
      EXPECT_EQ(forced.status().code(), StatusCode::kUsage);
      EXPECT_NE(forced.status().message().find(missing), std::string::npos);
    }
  }
  ASSERT_EQ(setenv("SORTIE_ISA", "sse9", 1), 0);
  EXPECT_EQ(choose_isa().status().code(), StatusCode::kUsage);
  ASSERT_EQ(unsetenv("SORTIE_ISA"), 0);
  EXPECT_EQ(choose_isa().value(), detect_isa());
}

TEST(ChooseIsa, UnverifiedTilesAreNeverTheDefault) {
  EXPECT_NE(detect_isa(), Isa::kAmx);
  const std::string note = isa_note(Isa::kAmx);
  EXPECT_TRUE(note.find("never run") != std::string::npos ||
              note.find("not compiled") != std::string::npos);
  EXPECT_EQ(available_isas().front(), Isa::kGeneric);
}

}  // namespace
}  // namespace sortie::cpu
