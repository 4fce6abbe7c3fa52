#include "model/config.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>

#include "base/json.h"

namespace sortie::model {
namespace {

using nlohmann::json;

std::string data(const std::string& name) {
  return read_text_file(std::string(SORTIE_SOURCE_DIR) + "/tests/data/" + name, 1 << 24).value();
}

Result<Config> parse(const std::string& config, const std::string& quant = "",
                     const std::string& generation = "") {
  return parse_config(config, quant, generation);
}

Config published(const std::string& name) {
  const Result<Config> c = parse(data("configs/" + name + ".config.json"));
  EXPECT_TRUE(c.is_ok()) << name << ": " << c.status().message();
  return c.is_ok() ? *c : Config{};
}

// One change of a good config, by JSON merge patch.
Result<Config> patched(const std::string& patch, const std::string& name = "DeepSeek-V3") {
  json j = json::parse(data("configs/" + name + ".config.json"));
  j.merge_patch(json::parse(patch));
  return parse(j.dump());
}

void expect_refused(const Result<Config>& r, const std::string& needle) {
  ASSERT_FALSE(r.is_ok()) << "expected a refusal with: " << needle;
  EXPECT_NE(r.status().message().find(needle), std::string::npos) << r.status().message();
  EXPECT_EQ(r.status().code(), StatusCode::kInvalid);
}

struct Row {  // the table of published values
  const char* name;
  int64_t hidden, intermediate, moe;
  int layers, dense, heads, experts, shared, topk, groups, topk_groups;
  ops::Scoring scoring;
  ops::TopkMethod method;
  bool norm;
  double scaling;
  int64_t q_lora, vocab, positions;
  double theta, eps;
  int nextn;
  int32_t bos, eos;
  double factor, beta_fast, mscale;
  Dialect dialect;
  bool ue8m0;
};

TEST(Config, PublishedValues) {
  using ops::Scoring;
  using ops::TopkMethod;
  const Row rows[] = {
      {"DeepSeek-V2-Lite",
       2048,
       10944,
       1408,
       27,
       1,
       16,
       64,
       2,
       6,
       1,
       1,
       Scoring::kSoftmax,
       TopkMethod::kGreedy,
       false,
       1.0,
       0,
       102400,
       163840,
       10000,
       1e-6,
       0,
       100000,
       100001,
       40,
       32,
       0.707,
       Dialect::kBf16,
       false},
      {"DeepSeek-V2.5",
       5120,
       12288,
       1536,
       60,
       1,
       128,
       160,
       2,
       6,
       8,
       3,
       Scoring::kSoftmax,
       TopkMethod::kGroupLimitedGreedy,
       false,
       16.0,
       1536,
       102400,
       163840,
       10000,
       1e-6,
       0,
       100000,
       100001,
       40,
       32,
       1.0,
       Dialect::kBf16,
       false},
      {"DeepSeek-V3",
       7168,
       18432,
       2048,
       61,
       3,
       128,
       256,
       1,
       8,
       8,
       4,
       Scoring::kSigmoid,
       TopkMethod::kNoauxTc,
       true,
       2.5,
       1536,
       129280,
       163840,
       10000,
       1e-6,
       1,
       0,
       1,
       40,
       32,
       1.0,
       Dialect::kFp8Block,
       false},
      {"DeepSeek-R1",
       7168,
       18432,
       2048,
       61,
       3,
       128,
       256,
       1,
       8,
       8,
       4,
       Scoring::kSigmoid,
       TopkMethod::kNoauxTc,
       true,
       2.5,
       1536,
       129280,
       163840,
       10000,
       1e-6,
       1,
       0,
       1,
       40,
       32,
       1.0,
       Dialect::kFp8Block,
       false},
      {"DeepSeek-V3.1.composed",
       7168,
       18432,
       2048,
       61,
       3,
       128,
       256,
       1,
       8,
       8,
       4,
       Scoring::kSigmoid,
       TopkMethod::kNoauxTc,
       true,
       2.5,
       1536,
       129280,
       163840,
       10000,
       1e-6,
       1,
       0,
       1,
       40,
       32,
       1.0,
       Dialect::kFp8Block,
       true},
      {"Moonlight-16B-A3B-Instruct",
       2048,
       11264,
       1408,
       27,
       1,
       16,
       64,
       2,
       6,
       1,
       1,
       Scoring::kSigmoid,
       TopkMethod::kNoauxTc,
       true,
       2.446,
       0,
       163840,
       8192,
       50000,
       1e-5,
       0,
       163584,
       163586,
       0,
       32,
       1.0,
       Dialect::kBf16,
       false},
      {"Kimi-K2-Instruct",
       7168,
       18432,
       2048,
       61,
       1,
       64,
       384,
       1,
       8,
       1,
       1,
       Scoring::kSigmoid,
       TopkMethod::kNoauxTc,
       true,
       2.827,
       1536,
       163840,
       131072,
       50000,
       1e-6,
       0,
       163584,
       163585,
       32,
       1,
       1.0,
       Dialect::kFp8Block,
       false},
  };
  for (const Row& r : rows) {
    SCOPED_TRACE(r.name);
    const Config c = published(r.name);
    EXPECT_EQ(c.hidden_size, r.hidden);
    EXPECT_EQ(c.intermediate_size, r.intermediate);
    EXPECT_EQ(c.moe_intermediate_size, r.moe);
    EXPECT_EQ(c.num_hidden_layers, r.layers);
    EXPECT_EQ(c.first_k_dense_replace, r.dense);
    EXPECT_EQ(c.num_attention_heads, r.heads);
    EXPECT_EQ(c.n_routed_experts, r.experts);
    EXPECT_EQ(c.n_shared_experts, r.shared);
    EXPECT_EQ(c.num_experts_per_tok, r.topk);
    EXPECT_EQ(c.n_group, r.groups);
    EXPECT_EQ(c.topk_group, r.topk_groups);
    EXPECT_EQ(c.scoring_func, r.scoring);
    EXPECT_EQ(c.topk_method, r.method);
    EXPECT_EQ(c.norm_topk_prob, r.norm);
    EXPECT_EQ(c.routed_scaling_factor, r.scaling);
    EXPECT_EQ(c.q_lora_rank, r.q_lora);
    EXPECT_EQ(c.vocab_size, r.vocab);
    EXPECT_EQ(c.max_position_embeddings, r.positions);
    EXPECT_EQ(c.rope_theta, r.theta);
    EXPECT_EQ(c.rms_norm_eps, r.eps);
    EXPECT_EQ(c.num_nextn_predict_layers, r.nextn);
    EXPECT_EQ(c.bos_token_id, r.bos);
    EXPECT_EQ(c.eos_token_ids, std::vector<int32_t>{r.eos});
    EXPECT_EQ(c.rope_scaling.factor, r.factor);
    EXPECT_EQ(c.rope_scaling.beta_fast, r.beta_fast);
    if (r.factor > 0) {
      EXPECT_EQ(c.rope_scaling.mscale, r.mscale);
      EXPECT_EQ(c.rope_scaling.mscale_all_dim, r.mscale);
      EXPECT_EQ(c.rope_scaling.beta_slow, 1);
      EXPECT_EQ(c.rope_scaling.original_max_position, 4096);
    }
    EXPECT_EQ(c.dialect, r.dialect);
    EXPECT_EQ(c.ue8m0_scales, r.ue8m0);
    EXPECT_EQ(c.kv_lora_rank, 512);
    EXPECT_EQ(c.qk_nope_head_dim, 128);
    EXPECT_EQ(c.qk_rope_head_dim, 64);
    EXPECT_EQ(c.v_head_dim, 128);
    EXPECT_EQ(c.moe_layer_freq, 1);
    EXPECT_FALSE(c.attention_bias);
    EXPECT_FALSE(c.tie_word_embeddings);
  }
}

TEST(Config, FoldersOfTheTestData) {
  for (const char* folder :
       {"models/mini", "tests/data/tiny/v3-yarn", "tests/data/tiny/v2-lite",
        "tests/data/tiny/v2-group", "tests/data/formats/bf16", "tests/data/formats/fp8_block",
        "tests/data/formats/w4afp8", "tests/data/formats/w8a8_compressed_tensors"}) {
    const Result<Config> c = load_config(std::string(SORTIE_SOURCE_DIR) + "/" + folder);
    EXPECT_TRUE(c.is_ok()) << c.status().message();
  }
  const std::string formats = std::string(SORTIE_SOURCE_DIR) + "/tests/data/formats/";
  EXPECT_EQ(load_config(formats + "bf16")->dialect, Dialect::kBf16);
  EXPECT_EQ(load_config(formats + "fp8_block")->dialect, Dialect::kFp8Block);
  EXPECT_EQ(load_config(formats + "w4afp8")->dialect, Dialect::kW4Afp8);
  const Config int8 = load_config(formats + "w8a8_compressed_tensors").value();
  EXPECT_EQ(int8.dialect, Dialect::kCompressedTensorsInt8);
  EXPECT_EQ(int8.quant_ignore, (std::vector<std::string>{"lm_head", "model.layers.1.mlp.gate"}));
  expect_refused(load_config("/nowhere/at/all"), "There is no model folder /nowhere/at/all");
  expect_refused(load_config(formats), "holds no config.json");
  expect_refused(load_config(formats + "calibrate.jsonl"), "is not a folder");
}

TEST(Config, RefusedByName) {
  expect_refused(parse(data("configs/related/DeepSeek-V3.2.config.json")), "indexer");
  expect_refused(parse(data("configs/related/GLM-4.5.config.json")), "glm4_moe");
  expect_refused(parse(data("configs/related/GLM-4.5.config.json")), "grouped-query");
  expect_refused(parse(data("configs/related/GLM-4.7-Flash.config.json")), "glm4_moe_lite");
  for (const char* native : {"DeepSeek-V3_671B", "DeepSeek-V2_236B", "DeepSeek-V3.1",
                             "DeepSeek-V2-Lite_16B", "DeepSeek-V3.2_671B"}) {
    EXPECT_FALSE(parse(data(std::string("configs/native/") + native + ".json")).is_ok()) << native;
  }
  expect_refused(parse(data("configs/native/DeepSeek-V3_671B.json")), "native inference config");
  expect_refused(patched(R"({"rope_scaling": {"type": "longrope"}})"), "\"longrope\"");
  expect_refused(patched(R"({"scoring_func": "tanh"})"), "scoring_func \"tanh\"");
  expect_refused(patched(R"({"topk_method": "aux"})"), "topk_method \"aux\"");
  expect_refused(patched(R"({"hidden_act": "gelu"})"), "hidden_act \"gelu\"");
  expect_refused(patched(R"({"num_key_value_heads": 8})"), "num_key_value_heads");
  expect_refused(patched(R"({"kv_lora_rank": null})"), "kv_lora_rank");
  expect_refused(patched(R"({"index_topk": 2048})"), "indexer");
  expect_refused(patched(R"({"rope_interleave": false})"), "rope_interleave");
}

TEST(Config, Quantisation) {
  const std::string r1 = data("configs/quantised/DeepSeek-R1-W4AFP8.composed.config.json");
  const std::string mixed = data("configs/quantised/DeepSeek-R1-W4AFP8.hf_quant_config.json");
  EXPECT_EQ(parse(r1, mixed)->dialect, Dialect::kW4Afp8);
  EXPECT_EQ(parse(r1)->dialect, Dialect::kBf16);
  // A folder that kept the source's fp8 section beside the mark.
  EXPECT_EQ(parse(data("configs/DeepSeek-R1.config.json"), mixed)->dialect, Dialect::kW4Afp8);
  EXPECT_EQ(patched(R"({"quantization_config": null})")->dialect, Dialect::kBf16);
  EXPECT_EQ(patched(R"({"quantization_config": {"quant_method": "w4afp8",
                        "weight_block_size": null}})")
                ->dialect,
            Dialect::kW4Afp8);
  EXPECT_EQ(patched(R"({"quantization_config": {"quant_method": "w8a8_int8",
                        "weight_block_size": null}})")
                ->dialect,
            Dialect::kCompressedTensorsInt8);
  const Result<Config> int8 =
      parse(data("configs/quantised/DeepSeek-R1-Channel-INT8.composed.config.json"));
  ASSERT_TRUE(int8.is_ok()) << int8.status().message();
  EXPECT_EQ(int8->dialect, Dialect::kCompressedTensorsInt8);
  EXPECT_EQ(int8->quant_ignore, std::vector<std::string>{"lm_head"});

  expect_refused(parse(data("configs/quantised/nvidia-DeepSeek-V3.1-NVFP4.config.json"),
                       data("configs/quantised/nvidia-DeepSeek-V3.1-NVFP4.hf_quant_config.json")),
                 "NVFP4");
  expect_refused(patched(R"({"quantization_config": {"quant_method": "awq"}})"), "\"awq\"");
  expect_refused(patched(R"({"quantization_config": {"weight_block_size": [64, 64]}})"), "[64,64]");
  expect_refused(patched(R"({"quantization_config": {"weight_block_size": null}})"), "none");
  expect_refused(patched(R"({"quantization_config": {"activation_scheme": "static"}})"), "static");
  expect_refused(patched(R"({"quantization_config": {"scale_fmt": "e5m2"}})"), "e5m2");
  expect_refused(patched(R"({"quantization_config": 7})"), "not an object");
  expect_refused(parse(r1, R"({"quantization": 3})"), "hf_quant_config.json");
  expect_refused(parse(r1, "["), "hf_quant_config.json is not valid JSON");
  json tensor =
      json::parse(data("configs/quantised/DeepSeek-R1-Channel-INT8.composed.config.json"));
  json& group = tensor["quantization_config"]["config_groups"]["group_0"];
  group["weights"]["strategy"] = "tensor";
  EXPECT_TRUE(parse(tensor.dump()).is_ok());
  group["weights"]["strategy"] = "block";
  expect_refused(parse(tensor.dump()), "strategy \"block\"");
  group["weights"]["strategy"] = "channel";
  group["input_activations"]["dynamic"] = false;
  expect_refused(parse(tensor.dump()), "dynamic false");
  group["weights"]["type"] = "float";
  expect_refused(parse(tensor.dump()), "type \"float\"");
}

TEST(Config, Defaults) {
  json v2 = json::parse(data("configs/DeepSeek-V2-Lite.config.json"));
  for (const char* key : {"scoring_func", "topk_method", "moe_layer_freq", "n_group", "topk_group",
                          "norm_topk_prob", "rope_theta", "rms_norm_eps", "attention_bias",
                          "tie_word_embeddings", "hidden_act", "bos_token_id", "eos_token_id"}) {
    v2.erase(key);
  }
  const Config c = parse(v2.dump()).value();
  EXPECT_EQ(c.scoring_func, ops::Scoring::kSoftmax);
  EXPECT_EQ(c.topk_method, ops::TopkMethod::kGreedy);
  EXPECT_EQ(c.moe_layer_freq, 1);
  EXPECT_EQ(c.n_group, 1);
  EXPECT_FALSE(c.norm_topk_prob);
  EXPECT_EQ(c.bos_token_id, -1);
  EXPECT_TRUE(c.eos_token_ids.empty());
  EXPECT_EQ(patched(R"({"q_lora_rank": 0})")->q_lora_rank, 0);
  EXPECT_EQ(patched(R"({"hidden_size": 7168.0})")->hidden_size, 7168);
  // transformers 5
  const Config v5 = patched(R"({"rope_theta": null, "rope_scaling": null, "rope_parameters":
      {"rope_type": "yarn", "rope_theta": 50000, "factor": 4, "mscale_all_dim": 1}})")
                        .value();
  EXPECT_EQ(v5.rope_theta, 50000);
  EXPECT_EQ(v5.rope_scaling.factor, 4);
  EXPECT_EQ(v5.rope_scaling.beta_fast, 32);
  EXPECT_EQ(v5.rope_scaling.mscale_all_dim, 1);
  EXPECT_EQ(patched(R"({"rope_scaling": {"type": "default"}})")->rope_scaling.factor, 0);
}

TEST(Config, EosIdsAreMerged) {
  const std::string v3 = data("configs/DeepSeek-V3.config.json");
  EXPECT_EQ(parse(v3, "", R"({"eos_token_id": [5, 1, 7, 5]})")->eos_token_ids,
            (std::vector<int32_t>{1, 5, 7}));
  EXPECT_EQ(parse(v3, "", R"({"eos_token_id": 9})")->eos_token_ids, (std::vector<int32_t>{1, 9}));
  EXPECT_EQ(parse(v3, "", "{}")->eos_token_ids, (std::vector<int32_t>{1}));
  expect_refused(parse(v3, "", R"({"eos_token_id": "x"})"), "generation_config.json");
  expect_refused(parse(v3, "", R"({"eos_token_id": [129280]})"), "129280");
  expect_refused(parse(v3, "", "nonsense"), "generation_config.json is not valid JSON");
  expect_refused(patched(R"({"eos_token_id": -1})"), "eos_token_id");
}

TEST(Config, AbsurdValues) {
  const struct {
    const char* patch;
    const char* needle;
  } cases[] = {
      {R"({"hidden_size": 0})", "\"hidden_size\" = 0"},
      {R"({"hidden_size": -7168})", "\"hidden_size\" = -7168"},
      {R"({"hidden_size": 1e18})", "\"hidden_size\" = 1e+18"},
      {R"({"hidden_size": 7168.5})", "not an integer"},
      {R"({"hidden_size": "7168"})", "not a number"},
      {R"({"hidden_size": null})", "lacks \"hidden_size\""},
      {R"({"vocab_size": 99999999999})", "vocab_size"},
      {R"({"num_hidden_layers": 1001})", "\"num_hidden_layers\" = 1001"},
      {R"({"num_attention_heads": 0, "num_key_value_heads": 0})", "num_attention_heads"},
      {R"({"num_experts_per_tok": 257})", "\"num_experts_per_tok\" = 257"},
      {R"({"n_group": 7})", "\"n_group\" = 7 does not divide"},
      {R"({"topk_group": 9})", "\"topk_group\" = 9"},
      {R"({"topk_group": 1, "num_experts_per_tok": 33})", "exceeds the 32 experts"},
      {R"({"n_group": 256, "topk_group": 256})", "one expert a group"},
      {R"({"qk_rope_head_dim": 63})", "\"qk_rope_head_dim\" = 63 is odd"},
      {R"({"kv_lora_rank": 0})", "\"kv_lora_rank\" = 0"},
      {R"({"num_attention_heads": 4096, "num_key_value_heads": 4096, "v_head_dim": 65536,
           "hidden_size": 1000000})",
       "absurd matrix"},
      {R"({"moe_layer_freq": 0})", "moe_layer_freq"},
      {R"({"rms_norm_eps": 0})", "rms_norm_eps"},
      {R"({"rope_theta": 0})", "rope_theta"},
      {R"({"routed_scaling_factor": -1})", "routed_scaling_factor"},
      {R"({"max_position_embeddings": 0})", "max_position_embeddings"},
      {R"({"norm_topk_prob": 1})", "norm_topk_prob"},
      {R"({"rope_scaling": {"factor": 0}})", "\"factor\" = 0"},
      {R"({"rope_scaling": {"beta_slow": 64}})", "beta_slow"},
      {R"({"rope_scaling": 4})", "not an object"},
      {R"({"model_type": 4})", "not a string"},
      {R"({"model_type": null})", "lacks \"model_type\""},
      {R"({"bos_token_id": 129280})", "bos_token_id"},
      {R"({"num_nextn_predict_layers": 17})", "num_nextn_predict_layers"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.patch);
    expect_refused(patched(c.patch), c.needle);
  }
  expect_refused(parse(""), "not valid JSON");
  expect_refused(parse("[]"), "not a JSON object");
  expect_refused(parse(std::string(100000, '[')), "deeper than 64");
  expect_refused(parse(R"({"hidden_size": 1e999})"), "not valid JSON");
  std::string nested = "{\"a\":";
  for (int i = 0; i < 63; ++i) nested += "[";
  for (int i = 0; i < 63; ++i) nested += "]";
  expect_refused(parse(nested + "}"), "lacks \"model_type\"");  // 64 levels are read
}

TEST(Rope, PlainFrequencies) {
  const Config c = published("Moonlight-16B-A3B-Instruct");
  EXPECT_DOUBLE_EQ(c.softmax_scale(), 1 / std::sqrt(192.0));
  const std::vector<float> t = c.cos_sin_table(3);
  ASSERT_EQ(t.size(), 3u * 32 * 2);
  EXPECT_EQ(t[0], 1.0f);
  EXPECT_EQ(t[1], 0.0f);
  for (int i = 0; i < 32; ++i) {
    const double angle = 2 * std::pow(50000.0, -2.0 * i / 64);
    EXPECT_NEAR(t[static_cast<size_t>((2 * 32 + i) * 2)], std::cos(angle), 1e-6);
    EXPECT_NEAR(t[static_cast<size_t>((2 * 32 + i) * 2 + 1)], std::sin(angle), 1e-6);
  }
}

// Fast pairs keep their frequency, slow ones are divided by the factor, between them a ramp.
TEST(Rope, YarnFrequenciesAndScales) {
  const Config c = published("DeepSeek-V3");
  const double m = 0.1 * std::log(40.0) + 1;
  EXPECT_DOUBLE_EQ(c.softmax_scale(), m * m / std::sqrt(192.0));
  const std::vector<float> t = c.cos_sin_table(2);
  const auto frequency = [&](int i) {
    return std::atan2(t[static_cast<size_t>((32 + i) * 2 + 1)],
                      t[static_cast<size_t>((32 + i) * 2)]);
  };
  EXPECT_NEAR(frequency(0), 1.0, 1e-6);
  EXPECT_NEAR(frequency(10), std::pow(10000.0, -20.0 / 64), 1e-7);  // low = 10
  EXPECT_NEAR(frequency(31) / (std::pow(10000.0, -62.0 / 64) / 40), 1, 1e-5);
  const double plain = std::pow(10000.0, -32.0 / 64);  // pair 16 of a ramp from 10 to 23
  const double share = 6.0 / 13;
  EXPECT_NEAR(frequency(16) / (plain / 40 * share + plain * (1 - share)), 1, 1e-5);

  // V2-Lite: mscale = mscale_all_dim = 0.707, so the table is unscaled and the softmax is not.
  const Config lite = published("DeepSeek-V2-Lite");
  const double ml = 0.1 * 0.707 * std::log(40.0) + 1;
  EXPECT_DOUBLE_EQ(lite.softmax_scale(), ml * ml / std::sqrt(192.0));
  EXPECT_EQ(lite.cos_sin_table(1)[0], 1.0f);

  // Without mscale_all_dim the table carries the factor.
  const Config no_all = patched(R"({"rope_scaling": {"mscale_all_dim": null}})").value();
  EXPECT_DOUBLE_EQ(no_all.softmax_scale(), 1 / std::sqrt(192.0));
  EXPECT_FLOAT_EQ(no_all.cos_sin_table(1)[0], static_cast<float>(m));

  // Kimi-K2: beta_fast = beta_slow = 1.
  const Config k2 = published("Kimi-K2-Instruct");
  for (const float v : k2.cos_sin_table(100)) EXPECT_TRUE(std::isfinite(v));
}

}  // namespace
}  // namespace sortie::model
