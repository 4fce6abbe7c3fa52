// `sortie quantize`, then loading, against quantising while loading.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <string>

#include "model/config.h"
#include "model/quantize.h"
#include "model/weights.h"

namespace sortie::model {
namespace {

namespace fs = std::filesystem;

// Every matrix of both: format, shape, codes, scales and static activation scale.
void expect_same(const quant::Matrix& a, const quant::Matrix& b, const std::string& where) {
  ASSERT_EQ(a.format, b.format) << where;
  ASSERT_EQ(a.n, b.n) << where;
  ASSERT_EQ(a.k, b.k) << where;
  if (a.n == 0) return;
  const auto bytes = static_cast<size_t>(a.n * a.code_row_bytes());
  EXPECT_EQ(std::memcmp(a.codes, b.codes, bytes), 0) << where;
  if (a.scales != nullptr) {
    const size_t scale_bytes = static_cast<size_t>(a.bytes()) - bytes;
    EXPECT_EQ(std::memcmp(a.scales, b.scales, scale_bytes), 0) << where;
  }
  EXPECT_EQ(a.input_scale, b.input_scale) << where;
  EXPECT_EQ(a.ue8m0_activations, b.ue8m0_activations) << where;
}

int expect_same(const LayerWeights& a, const LayerWeights& b, const std::string& where) {
  const auto linear = [&](const LinearWeights& x, const LinearWeights& y, const char* name) {
    expect_same(x.w, y.w, where + name);
  };
  const auto mlp = [&](const MlpWeights& x, const MlpWeights& y, const char* name) {
    linear(x.gate, y.gate, name);
    linear(x.up, y.up, name);
    linear(x.down, y.down, name);
  };
  linear(a.q, b.q, " q");
  linear(a.q_a, b.q_a, " q_a");
  linear(a.q_b, b.q_b, " q_b");
  linear(a.kv_a, b.kv_a, " kv_a");
  linear(a.o, b.o, " o");
  expect_same(a.kv_b, b.kv_b, where + " kv_b");
  mlp(a.mlp, b.mlp, " mlp");
  mlp(a.moe.shared, b.moe.shared, " shared");
  expect_same(a.moe.router, b.moe.router, where + " router");
  EXPECT_EQ(a.moe.gate_up.size(), b.moe.gate_up.size());
  for (size_t i = 0; i < a.moe.gate_up.size(); ++i) {
    expect_same(a.moe.gate_up[i], b.moe.gate_up[i], where + " gate_up");
  }
  for (size_t i = 0; i < a.moe.down.size(); ++i) {
    expect_same(a.moe.down[i], b.moe.down[i], where + " down");
  }
  return static_cast<int>(a.moe.down.size());
}

TEST(QuantizeLoad, LoadingWhatWasWrittenEqualsQuantisingWhileLoading) {
  const fs::path out = fs::temp_directory_path() / fmt::format("sortie-quantize-load-{}", getpid());
  const struct {
    Quantization format;
    bool dense, calibrated;
  } cases[] = {{Quantization::kFp8Block, false, false},
               {Quantization::kW8A8Int8, false, false},
               {Quantization::kW4Afp8, false, true},
               {Quantization::kW4Afp8, true, false}};
  for (const char* model : {"models/mini", "tests/data/formats/bf16"}) {
    for (const auto& c : cases) {
      QuantizeOptions options{.out = out.string(), .format = c.format, .quiet = true};
      options.in = fmt::format("{}/{}", SORTIE_SOURCE_DIR, model);
      options.dense_fp8_block = c.dense;
      const Config config = *load_config(options.in);
      LoadOptions load{.quantization = c.format, .dense_fp8_block = c.dense, .quiet = true};
      if (c.calibrated) {
        load.activation_scales.resize(static_cast<size_t>(config.num_hidden_layers));
        options.expert_amax.resize(load.activation_scales.size());
        for (int l = 0; l < config.num_hidden_layers; ++l) {
          if (!config.is_moe_layer(l)) continue;
          const auto i = static_cast<size_t>(l);
          options.expert_amax[i].assign(static_cast<size_t>(config.n_routed_experts), {2.0f, 3.0f});
          options.expert_amax[i][1] = {3.3f, 5.7f};
          load.activation_scales[i] = {input_scale(3.3f), input_scale(5.7f)};
        }
      }
      fs::remove_all(out);
      ASSERT_TRUE(quantize_checkpoint(options).is_ok());
      const auto written = load_weights(options.out, *load_config(options.out), {.quiet = true});
      ASSERT_TRUE(written.is_ok()) << written.status().message();
      const auto on_the_fly = load_weights(options.in, config, load);
      ASSERT_TRUE(on_the_fly.is_ok()) << on_the_fly.status().message();
      const Weights& a = *written.value()[0];
      const Weights& b = *on_the_fly.value()[0];
      const std::string where = fmt::format("{} as {}", model, static_cast<int>(c.format));
      int experts = 0;
      for (size_t l = 0; l < a.layers.size(); ++l) {
        experts += expect_same(a.layers[l], b.layers[l], fmt::format("{} layer {}", where, l));
      }
      EXPECT_GT(experts, 0);
      ASSERT_EQ(a.mtp.size(), b.mtp.size());
      for (size_t l = 0; l < a.mtp.size(); ++l) {
        expect_same(a.mtp[l].eh_proj.w, b.mtp[l].eh_proj.w, where + " eh_proj");
        expect_same(a.mtp[l].layer, b.mtp[l].layer, where + " mtp");
      }
      expect_same(a.lm_head, b.lm_head, where + " lm_head");
    }
  }
  fs::remove_all(out);
}

}  // namespace
}  // namespace sortie::model
