#include "model/plan.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "base/json.h"

namespace sortie::model {
namespace {

Config config(const std::string& name) {
  // A published config.json alone, without its folder.
  const std::string path = SORTIE_SOURCE_DIR "/tests/data/configs/" + name + ".config.json";
  const auto text = read_text_file(path, 1 << 20);
  EXPECT_TRUE(text.is_ok()) << text.status().message();
  const auto config = parse_config(*text, "", "");
  EXPECT_TRUE(config.is_ok()) << config.status().message();
  return *config;
}

// The models' published sizes: V3 has 671 B parameters with 37 B active (arXiv 2412.19437), V2-Lite
// 15.7 B with 2.4 B active (arXiv 2405.04434).
TEST(MemoryPlan, PublishedParameterCounts) {
  const MemoryPlan v3 = memory_plan(config("DeepSeek-V3"), {});
  EXPECT_NEAR(static_cast<double>(v3.parameters) * 1e-9, 671, 1);
  EXPECT_NEAR(static_cast<double>(v3.active_parameters) * 1e-9, 37, 1);
  const MemoryPlan lite = memory_plan(config("DeepSeek-V2-Lite"), {});
  EXPECT_NEAR(static_cast<double>(lite.parameters) * 1e-9, 15.7, 0.1);
  EXPECT_NEAR(static_cast<double>(lite.active_parameters) * 1e-9, 2.4, 0.2);
}

// One int4 expert of V3 is 22.02 MB of codes and 0.688 MB of scales.
TEST(MemoryPlan, Int4ExpertsOfV3) {
  const MemoryPlan plan =
      memory_plan(config("DeepSeek-V3"), {quant::Format::kW4Afp8, quant::Format::kFp8Block});
  EXPECT_NEAR(static_cast<double>(plan.expert_bytes) / (58.0 * 256), 22.02e6 + 0.688e6, 5e3);
  EXPECT_EQ(plan.cache_bytes_per_token, 61 * 576 * 4);
}

// The largest values that config.json may have overflow nothing: such a model is merely too large.
TEST(MemoryPlan, AbsurdConfigsAreTooLargeAndNoMore) {
  constexpr int64_t kWide = 1 << 20;
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const Config absurd{.vocab_size = 1 << 24,
                      .hidden_size = kWide,
                      .intermediate_size = kWide,
                      .moe_intermediate_size = kWide,
                      .num_hidden_layers = 1000,
                      .num_attention_heads = 4096,
                      .n_shared_experts = 1024,
                      .n_routed_experts = 65536,
                      .num_experts_per_tok = 65536,
                      .q_lora_rank = kWide,
                      .kv_lora_rank = kWide,
                      .qk_nope_head_dim = 65536,
                      .qk_rope_head_dim = 65536,
                      .v_head_dim = 65536};
  const MemoryPlan plan = memory_plan(absurd, {});
  EXPECT_EQ(plan.expert_bytes, kMost);
  EXPECT_EQ(plan.parameters, kMost);
  EXPECT_GT(plan.dense_bytes, int64_t{1} << 60);
  EXPECT_EQ(plan.bytes_per_token, kMost);
  const RankLoad load{.cache_tokens = kMost / 2,
                      .cache_layers = 1016,
                      .context_length = int64_t{1} << 31,
                      .step_rows = int64_t{1} << 31,
                      .decode_rows = int64_t{1} << 31,
                      .decode_segment = 1};
  EXPECT_EQ(cache_bytes(absurd, load), kMost);
  EXPECT_EQ(scratch_bytes(absurd, load), kMost);
}

}  // namespace
}  // namespace sortie::model
