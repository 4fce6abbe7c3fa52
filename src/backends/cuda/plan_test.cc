// What is decided on the host, tested without a GPU.
#include <gtest/gtest.h>

#include <vector>

#include "backends/cuda/cuda.h"
#include "backends/cuda/gemm.h"
#include "backends/cuda/mla.h"
#include "backends/cuda/sm90_w4afp8.h"

namespace sortie::cuda {
namespace {

TEST(GemmPlan, SegmentsFollowFromKAloneAndDivideABlock) {
  EXPECT_EQ(k_segments(1), 1);
  EXPECT_EQ(k_segments(128), 1);
  EXPECT_EQ(k_segments(129), 2);
  EXPECT_EQ(k_segments(512), 4);
  EXPECT_EQ(k_segments(640), 4);  // five chunks
  EXPECT_EQ(k_segments(7168), 8);
  for (int64_t k = 1; k < 20000; k += 37) EXPECT_EQ(kWarpsOfBlock % k_segments(k), 0);
}

TEST(GemmPlan, TilesHoldTheRows) {
  EXPECT_EQ(token_tiles(1), 1);
  EXPECT_EQ(token_tiles(8), 1);
  EXPECT_EQ(token_tiles(9), 2);
  EXPECT_EQ(token_tiles(32), 4);
  EXPECT_EQ(token_tiles(1000), 8);
}

TEST(MlaPlan, RowsAvoidBankConflictsAndFitShared) {
  for (const int64_t lora : {16, 64, 128, 512}) {
    for (const int64_t rope : {4, 16, 64}) {
      EXPECT_EQ(mla_row(lora, rope) * 2 % 16, 0);
      EXPECT_GE(mla_row(lora, rope), lora + rope);
      EXPECT_LE(mla_shared_bytes(lora, rope), 227 * 1024);
    }
  }
  EXPECT_EQ(mla_row(512, 64) * 2 / 4 % 32, 4);  // eight rows start on eight different bank groups
}

// Every code has four bits of its own, and stages hold nothing else.
TEST(W4Arrangement, PlacesAreDistinctAndFillTheStages) {
  const int64_t n = 256;
  const int64_t k = 512;
  std::vector<uint8_t> taken(static_cast<size_t>(n / kW4Rows * (k / kW4StageK) * kW4StageBytes));
  const auto take = [&](int64_t byte, int bits) {
    ASSERT_LT(static_cast<size_t>(byte), taken.size());
    EXPECT_EQ(taken[static_cast<size_t>(byte)] & bits, 0);
    taken[static_cast<size_t>(byte)] |= static_cast<uint8_t>(bits);
  };
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t column = 0; column < k; ++column) {
      const W4Place p = w4_place(row, column, k);
      take(p.magnitude_byte, 7 << p.magnitude_shift);
      take(p.sign_byte, 1 << p.sign_shift);
    }
    for (int64_t group = 0; group < k / 128; ++group) {
      take(w4_scale_place(row, group, k), 0xff);
      take(w4_scale_place(row, group, k) + 1, 0xff);
    }
  }
  for (const uint8_t byte : taken) ASSERT_EQ(byte, 0xff);
}

TEST(W4Arrangement, RefusesShapesAndCodesThatTheKernelCannotTake) {
  std::vector<std::byte> codes(128 * 128, std::byte{0x71});
  quant::Matrix m{.format = quant::Format::kW4Afp8, .n = 128, .k = 256, .codes = codes.data()};
  EXPECT_TRUE(w4_can_arrange(&m, 1));
  codes[77] = std::byte{0x81};
  EXPECT_FALSE(w4_can_arrange(&m, 1));
  codes[77] = std::byte{0x18};
  EXPECT_FALSE(w4_can_arrange(&m, 1));
  codes[77] = std::byte{0};
  m.k = 128;
  EXPECT_FALSE(w4_can_arrange(&m, 1));
}

TEST(W4Plan, StagesFitAndKeepTheMemoryBusy) {
  for (const int64_t rows : {1, 16, 17, 32, 33, 500}) {
    const int tokens = w4_tokens(rows);
    EXPECT_GE(w4_stages(tokens), 6);
    EXPECT_LE(w4_stages(tokens) * (kW4StageBytes + tokens * kW4StageK), 223 << 10);
  }
}

TEST(Backend, IsComplete) {
  const ops::BackendOf<bf16>& b = backend();
  ASSERT_NE(b.device, nullptr);
  for (const void* op :
       {reinterpret_cast<const void*>(b.embed), reinterpret_cast<const void*>(b.rms_norm),
        reinterpret_cast<const void*>(b.add_rms_norm), reinterpret_cast<const void*>(b.rope),
        reinterpret_cast<const void*>(b.quantise), reinterpret_cast<const void*>(b.linear),
        reinterpret_cast<const void*>(b.linear_f32), reinterpret_cast<const void*>(b.route),
        reinterpret_cast<const void*>(b.kv_append), reinterpret_cast<const void*>(b.mla_prefill),
        reinterpret_cast<const void*>(b.mla_decode), reinterpret_cast<const void*>(b.grouped_gemm),
        reinterpret_cast<const void*>(b.grouped_gemm_f32),
        reinterpret_cast<const void*>(b.swiglu_quantise),
        reinterpret_cast<const void*>(b.moe_reduce), reinterpret_cast<const void*>(b.moe_combine),
        reinterpret_cast<const void*>(b.sample)}) {
    EXPECT_NE(op, nullptr);
  }
}

TEST(Backend, SaysWhyThereIsNoGpu) {
  const Status s = available();
  if (s.is_ok()) GTEST_SKIP() << "there is a GPU: nothing to say";
  EXPECT_NE(s.message().find("--device cuda"), std::string::npos);
}

}  // namespace
}  // namespace sortie::cuda
