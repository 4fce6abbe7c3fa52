#include "model/weights.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/folder_test_util.h"
#include "base/json.h"
#include "model/dialect_test_util.h"
#include "quant/matrix_ops.h"

namespace sortie::model {
namespace {

using quant::Format;

const std::string kSource = SORTIE_SOURCE_DIR;

std::string formats(const std::string& name) { return kSource + "/tests/data/formats/" + name; }

using Loaded = Result<std::vector<std::shared_ptr<const Weights>>>;

Loaded load(const std::string& folder, LoadOptions options = {}, int only_rank = -1) {
  options.quiet = true;
  const Result<Config> config = load_config(folder);
  if (!config.is_ok()) return config.status();
  return load_weights(folder, *config, options, only_rank);
}

std::shared_ptr<const Weights> load_one(const std::string& folder, LoadOptions options = {}) {
  const Loaded loaded = load(folder, std::move(options));
  EXPECT_TRUE(loaded.is_ok()) << folder << ": " << loaded.status().message();
  return loaded.is_ok() ? loaded->front() : std::make_shared<const Weights>();
}

void expect_same(const quant::Matrix& a, const quant::Matrix& b, const std::string& what) {
  SCOPED_TRACE(what);
  ASSERT_EQ(a.format, b.format);
  ASSERT_EQ(a.n, b.n);
  ASSERT_EQ(a.k, b.k);
  ASSERT_EQ(a.input_scale, b.input_scale);
  if (a.n == 0) return;
  ASSERT_NE(a.codes, nullptr);
  ASSERT_NE(b.codes, nullptr);
  EXPECT_EQ(0, std::memcmp(a.codes, b.codes, static_cast<size_t>(a.n * a.code_row_bytes())));
  const auto scale_bytes = static_cast<size_t>(quant::scale_bytes(a.format, a.n, a.k));
  if (scale_bytes > 0) {
    EXPECT_EQ(0, std::memcmp(a.scales, b.scales, scale_bytes));
  }
}

void expect_same(const MlpWeights& a, const MlpWeights& b) {
  expect_same(a.gate.w, b.gate.w, "gate");
  expect_same(a.up.w, b.up.w, "up");
  expect_same(a.down.w, b.down.w, "down");
}

void expect_same(const Weights& a, const Weights& b, bool with_kv_b = true) {
  ASSERT_EQ(a.layers.size(), b.layers.size());
  expect_same(a.embed, b.embed, "embed");
  expect_same(a.lm_head, b.lm_head, "lm_head");
  for (size_t i = 0; i < a.layers.size(); ++i) {
    SCOPED_TRACE(i);
    const LayerWeights& x = a.layers[i];
    const LayerWeights& y = b.layers[i];
    expect_same(x.q.w, y.q.w, "q");
    expect_same(x.q_a.w, y.q_a.w, "q_a");
    expect_same(x.q_b.w, y.q_b.w, "q_b");
    expect_same(x.kv_a.w, y.kv_a.w, "kv_a");
    if (with_kv_b) expect_same(x.kv_b, y.kv_b, "kv_b");
    expect_same(x.o.w, y.o.w, "o");
    expect_same(x.mlp, y.mlp);
    expect_same(x.moe.router, y.moe.router, "router");
    expect_same(x.moe.shared, y.moe.shared);
    ASSERT_EQ(x.moe.gate_up.size(), y.moe.gate_up.size());
    ASSERT_EQ(x.moe.down.size(), y.moe.down.size());
    for (size_t e = 0; e < x.moe.gate_up.size(); ++e) {
      expect_same(x.moe.gate_up[e], y.moe.gate_up[e], "gate_up " + std::to_string(e));
    }
    for (size_t e = 0; e < x.moe.down.size(); ++e) {
      expect_same(x.moe.down[e], y.moe.down[e], "down " + std::to_string(e));
    }
  }
}

// A copy of a model folder that a test may spoil.
class Folder {
 public:
  explicit Folder(const std::string& from) {
    if (!from.empty()) {
      std::filesystem::copy(from, path_, std::filesystem::copy_options::recursive);
    }
  }
  const std::string& path() const { return path_; }
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(path_ + "/" + name, std::ios::binary) << text;
  }
  void patch_config(const std::string& patch) const {
    nlohmann::json j =
        nlohmann::json::parse(read_text_file(path_ + "/config.json", 1 << 20).value());
    j.merge_patch(nlohmann::json::parse(patch));
    write("config.json", j.dump());
  }

 private:
  TemporaryFolder folder_;
  const std::string path_ = folder_.path();
};

using Item = DialectTensor;

std::unique_ptr<Checkpoint> open(const std::string& folder) {
  Result<std::unique_ptr<Checkpoint>> r = Checkpoint::open(folder);
  return std::move(r.value());
}

// Rewrites a folder's tensors after `change`.
template <typename F>
void rewrite(const Folder& folder, F change) {
  std::vector<Item> items = read_tensors(folder.path());
  change(items);
  write_tensors(folder.path() + "/model.safetensors", items);
}

Item& item(std::vector<Item>& items, const std::string& name) {
  for (Item& i : items) {
    if (i.name == name) return i;
  }
  ADD_FAILURE() << "no tensor " << name;
  return items.front();
}

void expect_error(const Loaded& r, const std::vector<std::string>& needles) {
  ASSERT_FALSE(r.is_ok());
  for (const std::string& n : needles) {
    EXPECT_NE(r.status().message().find(n), std::string::npos)
        << "no \"" << n << "\" in: " << r.status().message();
  }
}

TEST(LoadWeights, AllCheckpointsOfTheTestData) {
  for (const char* name : {"v3-yarn", "v2-lite", "v2-group"}) {
    const auto w = load_one(kSource + "/tests/data/tiny/" + name);
    ASSERT_EQ(w->layers.size(), 3u) << name;
    EXPECT_FALSE(w->layers[0].is_moe);
    EXPECT_TRUE(w->layers[2].is_moe);
    EXPECT_EQ(w->layers[2].moe.down.size(), 16u);
    EXPECT_EQ(w->layers[2].moe.gate_up.size(), 32u);
    EXPECT_EQ(w->layers[1].q.w.n > 0, std::string(name) == "v2-lite");
    EXPECT_EQ(w->layers[1].moe.correction_bias != nullptr, std::string(name) == "v3-yarn");
  }
  const auto mini = load_one(kSource + "/models/mini");
  ASSERT_EQ(mini->layers.size(), 6u);
  ASSERT_EQ(mini->mtp.size(), 1u);
  EXPECT_EQ(mini->mtp[0].embed.codes, mini->embed.codes);
  EXPECT_EQ(mini->mtp[0].head.codes, mini->lm_head.codes);
  EXPECT_EQ(mini->mtp[0].eh_proj.w.k, 512);
  EXPECT_EQ(mini->layers[3].q_a_norm.eps, 1e-6f);
  EXPECT_EQ(mini->layers[3].q_a_norm.n, 128);
  EXPECT_NE(mini->final_norm.weight, nullptr);
}

TEST(LoadWeights, FormatsAreKept) {
  const auto bf16_file = load_one(formats("bf16"));
  EXPECT_EQ(bf16_file->layers[1].kv_b.format, Format::kBf16);
  EXPECT_EQ(bf16_file->layers[1].moe.down[0].format, Format::kBf16);
  const auto fp8 = load_one(formats("fp8_block"));
  EXPECT_EQ(fp8->layers[0].mlp.down.w.format, Format::kFp8Block);
  EXPECT_EQ(fp8->layers[1].kv_b.format, Format::kFp8Block);
  EXPECT_EQ(fp8->layers[1].moe.router.format, Format::kBf16);
  const auto int4 = load_one(formats("w4afp8"));
  EXPECT_EQ(int4->layers[1].moe.gate_up[3].format, Format::kW4Afp8);
  EXPECT_EQ(int4->layers[1].moe.shared.gate.w.format, Format::kFp8Block);
  EXPECT_EQ(int4->layers[1].kv_b.format, Format::kFp8Block);
  const auto int8 = load_one(formats("w8a8_compressed_tensors"));
  EXPECT_EQ(int8->layers[1].moe.gate_up[3].format, Format::kW8A8Int8);
  EXPECT_EQ(int8->layers[1].kv_b.format, Format::kW8A8Int8);

  // Dequantised values lie near the source's, by the format's step.
  const auto floats = [](const quant::Matrix& m) {
    std::vector<float> all(static_cast<size_t>(m.n * m.k));
    for (int64_t i = 0; i < m.n; ++i) quant::dequantise_row(m, i, all.data() + i * m.k);
    return all;
  };
  const std::vector<float> exact = floats(bf16_file->layers[1].kv_b);
  const std::vector<float> from_fp8 = floats(fp8->layers[1].kv_b);
  const std::vector<float> from_int8 = floats(int8->layers[1].kv_b);
  double error8 = 0, error_fp8 = 0, norm = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    const double e = exact[i];
    error8 += std::pow(from_int8[i] - e, 2);
    error_fp8 += std::pow(from_fp8[i] - e, 2);
    norm += e * e;
  }
  EXPECT_LT(std::sqrt(error8 / norm), 0.02);
  EXPECT_LT(std::sqrt(error_fp8 / norm), 0.05);
  EXPECT_GT(error8, 0);
  EXPECT_GT(error_fp8, 0);
}

TEST(LoadWeights, ActivationScaleIsTheMaximumOverAllExperts) {
  float largest[2] = {0, 0};
  for (const Item& i : read_tensors(formats("w4afp8"))) {
    if (!i.name.ends_with(".input_scale")) continue;
    float v = 0;
    std::memcpy(&v, i.bytes.data(), 4);
    float& gemm = largest[i.name.ends_with("w2.input_scale") ? 1 : 0];
    gemm = std::max(gemm, round_to_bf16(v));
  }
  ASSERT_GT(largest[0], 0);
  LoadOptions four;
  four.ranks = 4;
  for (int rank = 0; rank < 4; ++rank) {
    const Loaded r = load(formats("w4afp8"), four, rank);
    ASSERT_TRUE(r.is_ok()) << r.status().message();
    ASSERT_EQ(r->size(), 1u);
    const MoeWeights& moe = r->front()->layers[1].moe;
    ASSERT_EQ(moe.down.size(), 2u);
    for (const auto& m : moe.gate_up) EXPECT_EQ(m.input_scale, largest[0]);
    for (const auto& m : moe.down) EXPECT_EQ(m.input_scale, largest[1]);
  }
}

TEST(LoadWeights, ActivationScaleForms) {
  // bf16 and scalar are read alike; a partial set is an error, none means dynamic, 0 is refused.
  const Folder folder(formats("w4afp8"));
  const float expected = load_one(folder.path())->layers[1].moe.gate_up[0].input_scale;
  rewrite(folder, [](std::vector<Item>& items) {
    for (Item& i : items) {
      if (!i.name.ends_with(".input_scale")) continue;
      float v = 0;
      std::memcpy(&v, i.bytes.data(), 4);
      const bf16 b = to_bf16(v);
      i.dtype = DType::kBf16;
      i.shape = {};
      i.bytes.assign(reinterpret_cast<const char*>(&b), 2);
    }
  });
  EXPECT_EQ(load_one(folder.path())->layers[1].moe.gate_up[0].input_scale, expected);
  rewrite(folder, [](std::vector<Item>& items) {
    Item& i = item(items, "model.layers.1.mlp.experts.5.w3.input_scale");
    i.bytes.assign(2, '\0');
  });
  expect_error(load(folder.path()), {"experts.5 has an input_scale of 0"});
  rewrite(folder, [](std::vector<Item>& items) {
    std::erase_if(items, [](const Item& i) { return i.name.ends_with("5.w3.input_scale"); });
  });
  expect_error(load(folder.path()), {"1 missing: model.layers.1.mlp.experts.5.w3.input_scale"});
  rewrite(folder, [](std::vector<Item>& items) {
    std::erase_if(items, [](const Item& i) { return i.name.ends_with("input_scale"); });
  });
  EXPECT_EQ(load_one(folder.path())->layers[1].moe.gate_up[0].input_scale, 0);
}

TEST(LoadWeights, QuantisingWhileLoadingGivesThePublishedBytes) {
  LoadOptions fp8;
  fp8.quantization = Quantization::kFp8Block;
  expect_same(*load_one(formats("bf16"), fp8), *load_one(formats("fp8_block")));

  const auto published4 = load_one(formats("w4afp8"));
  const auto& moe = published4->layers[1].moe;
  LoadOptions int4;
  int4.quantization = Quantization::kW4Afp8;
  int4.dense_fp8_block = true;
  int4.activation_scales = {{0, 0}, {moe.gate_up[0].input_scale, moe.down[0].input_scale}};
  expect_same(*load_one(formats("bf16"), int4), *published4);

  // Routed experts alone, dynamic: the rest stays as it was.
  LoadOptions alone;
  alone.quantization = Quantization::kW4Afp8;
  const auto w = load_one(formats("bf16"), alone);
  EXPECT_EQ(w->layers[0].mlp.gate.w.format, Format::kBf16);
  EXPECT_EQ(w->layers[1].kv_b.format, Format::kBf16);
  EXPECT_EQ(w->layers[1].moe.down[1].format, Format::kW4Afp8);
  EXPECT_EQ(w->layers[1].moe.down[1].input_scale, 0);

  LoadOptions int8;
  int8.quantization = Quantization::kW8A8Int8;
  const auto loaded8 = load_one(formats("bf16"), int8);
  expect_same(*loaded8, *load_one(formats("w8a8_compressed_tensors")), /*with_kv_b=*/false);
  EXPECT_EQ(loaded8->layers[1].kv_b.format, Format::kBf16);
}

TEST(LoadWeights, FlagAndFile) {
  LoadOptions options;
  options.quantization = Quantization::kW8A8Int8;
  const Loaded differs = load(formats("w4afp8"), options);
  expect_error(differs, {"w4afp8", "--quantization w8a8_int8"});
  EXPECT_EQ(differs.status().code(), StatusCode::kUsage);
  EXPECT_TRUE(load(formats("w8a8_compressed_tensors"), options).is_ok());
  // int8 tensors that config.json does not mention
  const Folder folder(formats("w8a8_compressed_tensors"));
  folder.patch_config(R"({"quantization_config": null})");
  expect_error(load(folder.path()), {"mistyped", "I8 instead of BF16"});
  expect_same(*load_one(folder.path(), options), *load_one(formats("w8a8_compressed_tensors")));
}

TEST(LoadWeights, RanksShareAllButExperts) {
  const std::string mini = kSource + "/models/mini";
  const auto whole = load_one(mini);
  LoadOptions options;
  options.ranks = 4;
  const Loaded ranks = load(mini, options);
  ASSERT_TRUE(ranks.is_ok());
  ASSERT_EQ(ranks->size(), 4u);
  for (size_t r = 0; r < 4; ++r) {
    const Weights& w = *(*ranks)[r];
    EXPECT_EQ(w.layers[2].o.w.codes, (*ranks)[0]->layers[2].o.w.codes);
    ASSERT_EQ(w.layers[2].moe.down.size(), 4u);
    ASSERT_EQ(w.mtp[0].layer.moe.down.size(), 4u);
    for (size_t e = 0; e < 4; ++e) {
      expect_same(w.layers[2].moe.down[e], whole->layers[2].moe.down[4 * r + e], "down");
      expect_same(w.layers[2].moe.gate_up[2 * e + 1],
                  whole->layers[2].moe.gate_up[8 * r + 2 * e + 1], "up");
      expect_same(w.mtp[0].layer.moe.gate_up[2 * e], whole->mtp[0].layer.moe.gate_up[8 * r + 2 * e],
                  "mtp gate");
    }
  }
  options.ranks = 3;
  const Loaded odd = load(mini, options);
  expect_error(odd, {"--ep-size 3 does not divide the 16 experts"});
  EXPECT_EQ(odd.status().code(), StatusCode::kUsage);
}

TEST(LoadWeights, AllProblemsInOneError) {
  const Folder folder(formats("bf16"));
  rewrite(folder, [](std::vector<Item>& items) {
    std::erase_if(items, [](const Item& i) {
      return i.name == "model.norm.weight" || i.name.ends_with("experts.3.up_proj.weight");
    });
    Item& o = item(items, "model.layers.0.self_attn.o_proj.weight");
    o.shape = {128, 512};
    Item& gate = item(items, "model.layers.1.mlp.gate.weight");
    gate.dtype = DType::kF16;
    items.push_back({"model.layers.0.self_attn.indexer.weight", DType::kF32, {1}, "abcd"});
    items.push_back({"model.layers.0.self_attn.rotary_emb.inv_freq", DType::kF32, {1}, "abcd"});
    items.push_back({"model.layers.2.anything", DType::kF32, {1}, "abcd"});
  });
  const Loaded r = load(folder.path());
  expect_error(r, {"2 missing: model.layers.1.mlp.experts.3.up_proj.weight, model.norm.weight",
                   "1 misshapen: model.layers.0.self_attn.o_proj.weight is [128, 512] instead of "
                   "[256, 256]",
                   "1 mistyped: model.layers.1.mlp.gate.weight is F16 instead of BF16 or F32",
                   "1 unexpected: model.layers.0.self_attn.indexer.weight"});
  EXPECT_EQ(r.status().message().find("inv_freq"), std::string::npos);
  EXPECT_EQ(r.status().message().find("anything"), std::string::npos);

  // Many of a kind are counted, ten are named.
  const Folder many(formats("bf16"));
  many.patch_config(R"({"n_routed_experts": 16})");
  expect_error(load(many.path()), {"24 missing", ", ...", "misshapen"});
}

TEST(LoadWeights, MtpLayerMayBeAbsentOrHaveItsCopies) {
  const Folder folder(kSource + "/models/mini");
  rewrite(folder, [](std::vector<Item>& items) {
    Item embed = item(items, "model.embed_tokens.weight");
    embed.name = "model.layers.6.embed_tokens.weight";
    Item head = item(items, "lm_head.weight");
    head.name = "model.layers.6.shared_head.head.weight";
    items.push_back(embed);
    items.push_back(head);
  });
  const auto copies = load_one(folder.path());
  EXPECT_NE(copies->mtp[0].embed.codes, copies->embed.codes);
  expect_same(copies->mtp[0].embed, copies->embed, "embed");
  EXPECT_NE(copies->mtp[0].head.codes, copies->lm_head.codes);
  rewrite(folder, [](std::vector<Item>& items) {
    std::erase_if(items, [](const Item& i) { return i.name.starts_with("model.layers.6."); });
  });
  EXPECT_TRUE(load_one(folder.path())->mtp.empty());
  folder.patch_config(R"({"num_nextn_predict_layers": 0})");
  EXPECT_TRUE(load_one(folder.path())->mtp.empty());
}

TEST(LoadWeights, TiedEmbeddingsAndBiases) {
  const Folder folder(kSource + "/tests/data/tiny/v3-yarn");
  folder.patch_config(R"({"tie_word_embeddings": true, "attention_bias": true})");
  expect_error(load(folder.path()), {"9 missing: model.layers.0.self_attn.q_a_proj.bias"});
  rewrite(folder, [](std::vector<Item>& items) {
    std::erase_if(items, [](const Item& i) { return i.name == "lm_head.weight"; });
    for (const char* layer : {"0", "1", "2"}) {
      const std::string prefix = std::string("model.layers.") + layer + ".self_attn.";
      const bf16 one = to_bf16(1.5f);
      const auto bias = [&](const char* name, int64_t n) {
        Item b{prefix + name, DType::kBf16, {n}, {}};
        for (int64_t i = 0; i < n; ++i) b.bytes.append(reinterpret_cast<const char*>(&one), 2);
        items.push_back(b);
      };
      bias("q_a_proj.bias", 96);
      bias("kv_a_proj_with_mqa.bias", 80);
      bias("o_proj.bias", 128);
    }
  });
  const auto w = load_one(folder.path());
  EXPECT_EQ(w->lm_head.codes, w->embed.codes);
  ASSERT_NE(w->layers[1].o.bias, nullptr);
  EXPECT_EQ(w->layers[1].o.bias[127], 1.5f);
  EXPECT_EQ(w->layers[1].kv_a.bias[79], 1.5f);
  EXPECT_EQ(w->layers[1].q_b.bias, nullptr);
}

// Odd offsets: a one-byte tensor first makes everything behind it unaligned.
TEST(LoadWeights, UnalignedTensorsAreCopied) {
  for (const char* name : {"bf16", "fp8_block", "w4afp8", "w8a8_compressed_tensors"}) {
    SCOPED_TRACE(name);
    const Folder folder(formats(name));
    rewrite(folder, [](std::vector<Item>& items) {
      items.insert(items.begin(), {"model.layers.9.x", DType::kU8, {1}, "x"});
    });
    expect_same(*load_one(folder.path()), *load_one(formats(name)));
  }
}

TEST(LoadWeights, PowerOfTwoScales) {
  // scale_fmt ue8m0: scales as F8_E8M0 mean 2^(code - 127).
  const Folder folder(formats("fp8_block"));
  folder.patch_config(R"({"quantization_config": {"scale_fmt": "ue8m0"}})");
  rewrite(folder, [](std::vector<Item>& items) {
    for (Item& i : items) {
      if (!i.name.ends_with("weight_scale_inv")) continue;
      i.dtype = DType::kE8m0;
      i.bytes.assign(i.bytes.size() / 4, static_cast<char>(120));
    }
  });
  const auto w = load_one(folder.path());
  EXPECT_TRUE(w->layers[0].o.w.ue8m0_activations);
  EXPECT_EQ(w->layers[0].o.w.f32_scales()[3], 0x1p-7f);
}

TEST(LoadWeights, ExpertsOfOneLayerMustAgree) {
  const Folder folder(formats("fp8_block"));
  rewrite(folder, [](std::vector<Item>& items) {
    Item& e = item(items, "model.layers.1.mlp.experts.2.up_proj.weight");
    e.dtype = DType::kBf16;
    e.bytes += e.bytes;
    std::erase_if(items, [](const Item& i) {
      return i.name == "model.layers.1.mlp.experts.2.up_proj.weight_scale_inv";
    });
  });
  expect_error(load(folder.path()), {"experts of one layer differ in type"});
}

TEST(LoadWeights, TruncatedWhileMapped) {
  const Folder folder(kSource + "/models/mini");
  const std::string path = folder.path() + "/model.safetensors";
  const auto size = static_cast<int64_t>(std::filesystem::file_size(path));
  // Within the last page no fault tells; further in, every read past the end would be a SIGBUS.
  for (const int64_t left : {size - 1, size / 2, int64_t{100'000}, int64_t{0}}) {
    SCOPED_TRACE(left);
    std::filesystem::copy_file(kSource + "/models/mini/model.safetensors", path,
                               std::filesystem::copy_options::overwrite_existing);
    const auto checkpoint = open(folder.path());
    EXPECT_TRUE(checkpoint->check().is_ok());
    ASSERT_EQ(::truncate(path.c_str(), left), 0);
    int64_t sum = 0;
    for (const auto& [name, entry] : checkpoint->tensors()) {
      for (int64_t i = 0; i < entry.tensor.bytes(); i += 512) {
        sum += static_cast<int64_t>(entry.tensor.data[i]);
      }
    }
    EXPECT_GE(sum, 0);
    const Status s = checkpoint->check();
    ASSERT_FALSE(s.is_ok());
    EXPECT_EQ(s.message(), path + " was truncated while it was read.");
  }
}

}  // namespace
}  // namespace sortie::model
