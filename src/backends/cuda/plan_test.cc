// What is decided on the host, tested without a GPU.
#include <gtest/gtest.h>

#include "backends/cuda/cuda.h"
#include "backends/cuda/gemm.h"
#include "backends/cuda/mla.h"

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
