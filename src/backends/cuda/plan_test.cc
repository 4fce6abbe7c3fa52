// What is decided on the host, tested without a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "backends/cuda/cuda.h"
#include "backends/cuda/gemm.h"
#include "backends/cuda/mla.h"
#include "backends/cuda/sm90_tiles.h"

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

// Every code has four bits of its own, and tiles hold nothing else but their flags.
TEST(Tiles, PlacesAreDistinctAndFillTheTiles) {
  const quant::Matrix m{.format = quant::Format::kW4Afp8, .n = 256, .k = 384};
  std::vector<uint8_t> taken(static_cast<size_t>(packed_bytes(m)));
  const auto take = [&](int64_t byte, int bits) {
    ASSERT_LT(static_cast<size_t>(byte), taken.size());
    EXPECT_EQ(taken[static_cast<size_t>(byte)] & bits, 0);
    taken[static_cast<size_t>(byte)] |= static_cast<uint8_t>(bits);
  };
  for (int64_t row = 0; row < m.n; ++row) {
    for (int64_t column = 0; column < m.k; ++column) {
      const W4Place p = w4_place(row, column, m.k);
      take(p.magnitude_byte, 7 << p.magnitude_shift);
      take(p.sign_byte, 1 << p.sign_shift);
    }
    for (int64_t group = 0; group < m.k_groups(); ++group) {
      take(w4_scale_at(row, group, m.k), 0xff);
      take(w4_scale_at(row, group, m.k) + 1, 0xff);
    }
  }
  const auto tiles = static_cast<size_t>(all_tiles_bytes(m.n, m.k, kW4TileBytes));
  for (size_t i = 0; i < taken.size(); ++i) ASSERT_EQ(taken[i], i < tiles ? 0xff : 0) << i;
}

TEST(Tiles, Int8PlacesAreDistinct) {
  const int64_t n = 256;
  const int64_t k = 256;
  std::vector<bool> taken(static_cast<size_t>(n * k));
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t column = 0; column < k; ++column) {
      const auto at = static_cast<size_t>(int8_place(row, column, k));
      ASSERT_LT(at, taken.size());
      ASSERT_FALSE(taken[at]);
      taken[at] = true;
    }
  }
}

TEST(Tiles, WhichMatricesArePackedFollowsFromTheShape) {
  using quant::Format;
  EXPECT_EQ(packed_bytes({.format = Format::kW4Afp8, .n = 2048, .k = 7168}),
            16 * (56 * int64_t{kW4TileBytes} + kW4TailBytes));
  EXPECT_GT(packed_bytes({.format = Format::kW4Afp8, .n = 1408, .k = 2048}), 0);
  EXPECT_EQ(packed_bytes({.format = Format::kW4Afp8, .n = 64, .k = 128}), 0);
  EXPECT_EQ(packed_bytes({.format = Format::kW4Afp8, .n = 128, .k = 192}), 0);
  EXPECT_EQ(packed_bytes({.format = Format::kW8A8Int8, .n = 256, .k = 128}), 256 * 128 + 256 * 4);
  EXPECT_EQ(packed_bytes({.format = Format::kBf16, .n = 128, .k = 128}), 0);
}

TEST(Tiles, PairsCoverTheMatrix) {
  EXPECT_EQ(tile_pairs(2048, 2), 16);  // a pair is gate's and up's
  EXPECT_EQ(tile_pairs(7168, 1), 28);
  EXPECT_EQ(tile_pairs(384, 1), 2);  // the last tile stands alone
}

TEST(Tiles, StagesFitAndKeepTheMemoryBusy) {
  for (const int bytes : {kW4TileBytes, kInt8TileBytes}) {
    const int in_flight = stages(bytes);
    EXPECT_GE(in_flight * 2 * bytes, 64 << 10);
    EXPECT_LE(in_flight * (2 * bytes + kTokensOfBlock * kTileK), 219 << 10);
  }
}

TEST(Tiles, ColumnsCoverTheTokens) {
  for (int tokens = 1; tokens <= kTokensOfBlock; ++tokens) {
    EXPECT_GE(token_columns(tokens), tokens);
    EXPECT_LE(token_columns(tokens), std::max(16, 2 * tokens));
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
