// Checkpoints written in every dialect and read back: against the bf16 source, against the same
// weights in another form, and against each dialect's formula computed plainly from the file.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>

#include "backends/cpu/isa.h"
#include "backends/reference/reference.h"
#include "base/folder_test_util.h"
#include "model/dialect_test_util.h"
#include "model/quant_description.h"
#include "model/weights.h"

namespace sortie::model {
namespace {

using quant::Matrix;
using Loaded = Result<std::vector<std::shared_ptr<const Weights>>>;

class Folder {
 public:
  explicit Folder(TestDialect dialect) { write_test_dialect(dialect, path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  const std::string& path() const { return path_; }
  std::string read(const std::string& name) const {
    std::ifstream file(path_ + "/" + name);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(path_ + "/" + name, std::ios::binary) << text;
  }
  void patch(const std::string& name, const std::string& patch) const {
    nlohmann::json j = nlohmann::json::parse(read(name));
    j.merge_patch(nlohmann::json::parse(patch));
    write(name, j.dump());
  }
  Loaded load(int ranks = 1, int only_rank = -1) const {
    const Result<Config> config = load_config(path_);
    if (!config.is_ok()) return config.status();
    LoadOptions options;
    options.quiet = true;
    options.ranks = ranks;
    return load_weights(path_, *config, options, only_rank);
  }
  std::shared_ptr<const Weights> weights() const {
    const Loaded loaded = load();
    EXPECT_TRUE(loaded.is_ok()) << loaded.status().message();
    return loaded.is_ok() ? loaded->front() : nullptr;
  }
  // Whether the folder is refused, in one sentence with all needles.
  void expect_refused(const std::vector<std::string>& needles) const {
    const Loaded loaded = load();
    ASSERT_FALSE(loaded.is_ok()) << needles.front();
    const std::string& message = loaded.status().message();
    for (const std::string& n : needles) {
      EXPECT_NE(message.find(n), std::string::npos) << "no \"" << n << "\" in: " << message;
    }
    EXPECT_TRUE(message.ends_with('.')) << message;
  }

 private:
  TemporaryFolder folder_;
  const std::string path_ = folder_.path();
};

// Every matrix with its tensor's module, in the same order for any form of one model.
struct Named {
  std::string module;
  const Matrix* m;
};
std::vector<Named> matrices(const Weights& w) {
  std::vector<Named> all = {{"model.embed_tokens", &w.embed}, {"lm_head", &w.lm_head}};
  const auto layer = [&](const LayerWeights& l, const std::string& prefix) {
    const auto mlp = [&](const MlpWeights& m, const std::string& at) {
      all.push_back({at + "gate_proj", &m.gate.w});
      all.push_back({at + "up_proj", &m.up.w});
      all.push_back({at + "down_proj", &m.down.w});
    };
    all.push_back({prefix + "self_attn.q_a_proj", &l.q_a.w});
    all.push_back({prefix + "self_attn.q_b_proj", &l.q_b.w});
    all.push_back({prefix + "self_attn.kv_a_proj_with_mqa", &l.kv_a.w});
    all.push_back({prefix + "self_attn.kv_b_proj", &l.kv_b});
    all.push_back({prefix + "self_attn.o_proj", &l.o.w});
    if (!l.is_moe) return mlp(l.mlp, prefix + "mlp.");
    mlp(l.moe.shared, prefix + "mlp.shared_experts.");
    all.push_back({prefix + "mlp.gate", &l.moe.router});
    for (size_t e = 0; e < l.moe.down.size(); ++e) {
      const std::string expert = prefix + "mlp.experts." + std::to_string(e) + ".";
      all.push_back({expert + "gate_proj", &l.moe.gate_up[2 * e]});
      all.push_back({expert + "up_proj", &l.moe.gate_up[2 * e + 1]});
      all.push_back({expert + "down_proj", &l.moe.down[e]});
    }
  };
  layer(w.layers[0], "model.layers.0.");
  layer(w.layers[1], "model.layers.1.");
  EXPECT_EQ(w.mtp.size(), 1u);
  if (w.mtp.size() == 1) layer(w.mtp[0].layer, "model.layers.2.");
  return all;
}

// The weights' values; static int8 scales hold the activations' scale too.
std::vector<float> values(const Matrix& m) {
  std::vector<float> v(static_cast<size_t>(m.n * m.k));
  for (int64_t i = 0; i < m.n; ++i) quant::dequantise_row(m, i, v.data() + i * m.k);
  if (quant::act_format(m) == quant::ActFormat::kInt8Static) {
    for (float& x : v) x /= m.input_scale;
  }
  return v;
}

void expect_same(const Named& a, const Named& b) {
  SCOPED_TRACE(a.module);
  ASSERT_EQ(a.m->format, b.m->format);
  ASSERT_EQ(a.m->n, b.m->n);
  ASSERT_EQ(a.m->k, b.m->k);
  EXPECT_EQ(a.m->input_scale, b.m->input_scale);
  EXPECT_EQ(a.m->input_offset, b.m->input_offset);
  EXPECT_EQ(a.m->ue8m0_activations, b.m->ue8m0_activations);
  const auto n = static_cast<size_t>(a.m->n);
  EXPECT_EQ(0, std::memcmp(a.m->codes, b.m->codes, n * static_cast<size_t>(a.m->code_row_bytes())));
  const auto scales = static_cast<size_t>(quant::scale_bytes(a.m->format, a.m->n, a.m->k));
  if (scales > 0) {
    EXPECT_EQ(0, std::memcmp(a.m->scales, b.m->scales, scales));
  }
  ASSERT_EQ(a.m->sum_bias == nullptr, b.m->sum_bias == nullptr);
  if (a.m->sum_bias != nullptr) {
    EXPECT_EQ(0, std::memcmp(a.m->sum_bias, b.m->sum_bias, n * 4));
  }
}

TEST(Dialects, ValuesAreTheSourcesWithinTheFormatsStep) {
  const Folder source(TestDialect::kBf16);
  const auto exact = source.weights();
  ASSERT_NE(exact, nullptr);
  const std::vector<Named> expected = matrices(*exact);
  for (const TestDialect dialect : kTestDialects) {
    SCOPED_TRACE(test_dialect_name(dialect));
    const Folder folder(dialect);
    const auto loaded = folder.weights();
    ASSERT_NE(loaded, nullptr);
    const std::vector<Named> got = matrices(*loaded);
    ASSERT_EQ(got.size(), expected.size());
    int quantised = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      SCOPED_TRACE(got[i].module);
      const std::vector<float> a = values(*got[i].m);
      const std::vector<float> b = values(*expected[i].m);
      ASSERT_EQ(a.size(), b.size());
      double error = 0;
      double norm = 0;
      for (size_t k = 0; k < a.size(); ++k) {
        error += std::pow(double{a[k]} - b[k], 2);
        norm += std::pow(double{b[k]}, 2);
      }
      error = std::sqrt(error / norm);
      const bool int4 = got[i].m->format == quant::Format::kW4Afp8;
      EXPECT_LE(error, int4 ? 0.12 : 0.035);
      if (error == 0) continue;
      ++quantised;
      EXPECT_GT(error, int4 ? 0.02 : 0.001);
    }
    if (dialect == TestDialect::kBf16) {
      EXPECT_EQ(quantised, 0);
    } else {
      EXPECT_GE(quantised, 24);  // the experts of one layer at least
    }
  }
}

TEST(Dialects, TwoFormsOfTheSameWeightsAreOne) {
  const std::pair<TestDialect, TestDialect> pairs[] = {
      {TestDialect::kFp8BlockE8m0, TestDialect::kFp8BlockUe8m0},
      {TestDialect::kW4Afp8, TestDialect::kW4Afp8Bf16Scales},
      {TestDialect::kSlimStatic, TestDialect::kSlimStaticPacked}};
  for (const auto& [first, second] : pairs) {
    SCOPED_TRACE(test_dialect_name(first));
    const Folder a(first);
    const Folder b(second);
    const auto wa = a.weights();
    const auto wb = b.weights();
    ASSERT_TRUE(wa != nullptr && wb != nullptr);
    const auto ma = matrices(*wa);
    const auto mb = matrices(*wb);
    for (size_t i = 0; i < ma.size(); ++i) {
      if (first == TestDialect::kW4Afp8 && ma[i].module.starts_with("model.layers.2.")) continue;
      if (ma[i].m->format == mb[i].m->format) {
        expect_same(ma[i], mb[i]);
      } else {  // bf16, and fp16 widened
        EXPECT_EQ(values(*ma[i].m), values(*mb[i].m)) << ma[i].module;
      }
    }
  }
}

TEST(Dialects, MtpLayersGoByTheirTensors) {
  const Folder fp8(TestDialect::kW4Afp8);
  const Folder bf16s(TestDialect::kW4Afp8Bf16Scales);
  const auto a = fp8.weights();
  const auto b = bf16s.weights();
  ASSERT_TRUE(a != nullptr && b != nullptr);
  EXPECT_EQ(a->layers[1].moe.down[0].format, quant::Format::kW4Afp8);
  EXPECT_EQ(a->layers[1].moe.down[0].input_scale, round_to_bf16(0.017f));
  EXPECT_EQ(a->mtp[0].layer.moe.down[0].format, quant::Format::kFp8Block);
  EXPECT_EQ(a->mtp[0].layer.moe.down[0].input_scale, 0);
  EXPECT_EQ(b->mtp[0].layer.moe.down[0].format, quant::Format::kBf16);
}

// The published formula, from the file's own tensors, in integers and one fp32 product at the end.
std::vector<float> static_formula(const DialectTensors& file, const std::string& module,
                                  const std::vector<float>& x) {
  const DialectTensor& w = tensor_named(file, module + ".weight");
  const float scale = to_float(tensor_named(file, module + ".input_scale").at<bf16>(0));
  const float offset = to_float(tensor_named(file, module + ".input_offset").at<bf16>(0));
  const DialectTensor& bias = tensor_named(file, module + ".quant_bias");
  const DialectTensor& deq = tensor_named(file, module + ".deq_scale");
  std::vector<float> y;
  for (int64_t n = 0; n < w.shape[0]; ++n) {
    int64_t sum = bias.at<int32_t>(n);
    for (int64_t k = 0; k < w.shape[1]; ++k) {
      const float q = std::nearbyint(x[static_cast<size_t>(k)] / scale + offset);
      sum += w.at<int8_t>(n * w.shape[1] + k) * static_cast<int64_t>(std::clamp(q, -128.f, 127.f));
    }
    y.push_back(static_cast<float>(sum) * deq.at<float>(n));
  }
  return y;
}

TEST(Dialects, StaticLinearsComputeThePublishedFormula) {
  const Folder folder(TestDialect::kSlimStatic);
  const DialectTensors file = read_tensors(folder.path());
  const auto w = folder.weights();
  ASSERT_NE(w, nullptr);
  const Folder plain(TestDialect::kBf16);
  const auto exact = plain.weights();
  ThreadPool pool(1);
  Arena arena;
  const ops::Context context{pool, arena};
  const std::pair<std::string, const LinearWeights*> linears[] = {
      {"self_attn.q_a_proj", &w->layers[1].q_a},
      {"self_attn.kv_a_proj_with_mqa", &w->layers[1].kv_a},
      {"self_attn.o_proj", &w->layers[1].o},
      {"mlp.shared_experts.gate_proj", &w->layers[1].moe.shared.gate}};
  const LinearWeights* sources[] = {&exact->layers[1].q_a, &exact->layers[1].kv_a,
                                    &exact->layers[1].o, &exact->layers[1].moe.shared.gate};
  for (size_t i = 0; i < std::size(linears); ++i) {
    const auto& [name, linear] = linears[i];
    SCOPED_TRACE(name);
    const Matrix& m = linear->w;
    EXPECT_NE(m.input_offset, 0);
    std::vector<float> x(static_cast<size_t>(m.k));
    for (size_t k = 0; k < x.size(); ++k) {
      x[k] = static_cast<float>(static_cast<int>(k * 97 % 251) - 125) / 40;
    }
    x[3] = 40;  // saturates
    const std::vector<float> expected = static_formula(file, "model.layers.1." + name, x);
    const auto run = [&](const ops::Backend& backend) {
      quant::Rows rows = ops::rows_like<float>(m, 1);
      rows.data = arena.alloc_bytes(static_cast<size_t>(rows.row_bytes()));
      backend.quantise({x.data(), m.k, rows}, context);
      std::vector<float> y(static_cast<size_t>(m.n));
      backend.linear({rows, m, linear->bias, y.data(), m.n}, context);
      return y;
    };
    EXPECT_EQ(run(reference::backend()), expected);
    for (const cpu::Isa isa : cpu::available_isas()) {
      EXPECT_EQ(run(cpu::backend(isa)), expected) << cpu::isa_name(isa);
    }
    // And the formula is the linear: offset and bias cancel.
    x[3] = 0;
    const std::vector<float> y = static_formula(file, "model.layers.1." + name, x);
    const std::vector<float> weights = values(*&sources[i]->w);
    double error = 0;
    double norm = 0;
    for (int64_t n = 0; n < m.n; ++n) {
      double sum = 0;
      for (int64_t k = 0; k < m.k; ++k) {
        sum += double{weights[static_cast<size_t>(n * m.k + k)]} * x[static_cast<size_t>(k)];
      }
      error += std::pow(sum - y[static_cast<size_t>(n)], 2);
      norm += sum * sum;
    }
    EXPECT_LT(std::sqrt(error / norm), 0.02);
  }
}

TEST(Dialects, NormBiasesAreAddedAfterTheWeight) {
  const Folder folder(TestDialect::kSlimStatic);
  const auto w = folder.weights();
  ASSERT_NE(w, nullptr);
  for (const ops::NormWeight* norm :
       {&w->layers[0].input_norm, &w->layers[1].kv_a_norm, &w->final_norm, &w->mtp[0].enorm}) {
    ASSERT_NE(norm->bias, nullptr);
    EXPECT_EQ(norm->bias[1], 5.0f / 256);
  }
  ThreadPool pool(1);
  Arena arena;
  const ops::Context context{pool, arena};
  const ops::NormWeight& norm = w->layers[0].input_norm;
  const auto n = static_cast<size_t>(norm.n);
  std::vector<float> x(n);
  double squares = 0;
  for (size_t i = 0; i < n; ++i) {
    x[i] = static_cast<float>(i % 17) - 8;
    squares += double{x[i]} * x[i];
  }
  const auto check = [&](const ops::Backend& backend) {
    std::vector<float> y(n);
    backend.rms_norm(
        {.x = x.data(), .tokens = 1, .x_stride = norm.n, .norm = norm, .out = y.data()}, context);
    for (size_t i = 0; i < n; ++i) {
      const double expected =
          x[i] / std::sqrt(squares / static_cast<double>(n) + norm.eps) * norm.weight[i] +
          norm.bias[i];
      ASSERT_NEAR(y[i], expected, 1e-6) << i;
    }
  };
  check(reference::backend());
  for (const cpu::Isa isa : cpu::available_isas()) check(cpu::backend(isa));
}

TEST(Dialects, ExpertsOfALayerShareTheLargestStaticScale) {
  const Folder folder(TestDialect::kCompressedTensor);
  const DialectTensors file = read_tensors(folder.path());
  const Loaded ranks = folder.load(4);
  ASSERT_TRUE(ranks.is_ok()) << ranks.status().message();
  for (size_t r = 0; r < 4; ++r) {
    const MoeWeights& moe = (*ranks)[r]->layers[1].moe;
    for (size_t i = 0; i < moe.down.size(); ++i) {
      const std::string module =
          "model.layers.1.mlp.experts." + std::to_string(2 * r + i) + ".down_proj";
      EXPECT_EQ(moe.down[i].input_scale, 0.0625f);
      EXPECT_EQ(moe.gate_up[2 * i].input_scale, 0.0625f);
      EXPECT_EQ(moe.down[i].f32_scales()[7],
                0.0625f * tensor_named(file, module + ".weight_scale").at<float>(0));
    }
  }
}

const std::string kOProj = "model.layers.0.self_attn.o_proj";

// Rewrites the tensors after `change`.
template <typename F>
void rewrite(const Folder& folder, const std::string& file, F change) {
  DialectTensors tensors = read_tensors(folder.path());
  change(tensors);
  write_tensors(folder.path() + "/" + file, tensors);
}
DialectTensor& named(DialectTensors& tensors, const std::string& name) {
  return const_cast<DialectTensor&>(tensor_named(tensors, name));
}

TEST(Dialects, WrongMissingAndLyingDescriptionsAreRefused) {
  const std::string json = "quant_model_description.json";
  const Folder folder(TestDialect::kSlimStatic);
  const std::string good = folder.read(json);
  const auto with = [&](const std::string& text, const std::vector<std::string>& needles) {
    SCOPED_TRACE(needles.front());
    folder.write(json, text);
    folder.expect_refused(needles);
  };
  const auto patched = [&](const std::string& name, const std::string& value,
                           const std::vector<std::string>& needles) {
    folder.write(json, good);
    folder.patch(json, "{\"" + name + "\": " + value + "}");
    with(folder.read(json), needles);
  };
  with("", {json + " is empty"});
  with("{", {json});
  with("[]", {json + " is not a JSON object"});
  with("{}", {json + " names no weight"});
  patched(kOProj + ".weight", "\"W8A8_MIX\"", {kOProj, "W8A8_MIX", "Sortie reads FLOAT"});
  patched(kOProj + ".weight", "\"W4A8_DYNAMIC\"", {kOProj, "W4A8_DYNAMIC"});
  patched(kOProj + ".weight", "17", {kOProj, "17"});
  patched("kv_quant_type", "\"C8\"", {"kv_quant_type", "C8"});
  patched(kOProj + ".weight", "\"FLOAT\"", {kOProj, "I8", "the description says FLOAT"});
  patched(kOProj + ".weight", "null", {kOProj, "I8 without an entry in the description"});
  patched(kOProj + ".weight", "\"W8A8_DYNAMIC\"", {"missing: " + kOProj + ".weight_scale"});
  patched("model.layers.0.self_attn.kv_b_proj.weight", "\"W8A8_DYNAMIC\"",
          {"kv_b_proj.weight is BF16", "the description says W8A8"});
  patched("model.layers.1.mlp.experts.2.up_proj.weight", "\"W8A8\"",
          {"experts.2.up_proj.weight is W8A8; experts are read as W8A8_DYNAMIC"});
  folder.write(json, good);
  folder.patch("config.json", R"({"quantization_config": {"quant_method": "w8a8_int8"}})");
  folder.expect_refused({"Both config.json", json});
  // The source's fp8 section may stay.
  folder.patch("config.json", R"({"quantization_config": {"quant_method": "fp8",
      "weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"}})");
  EXPECT_TRUE(folder.load().is_ok());
  folder.patch("config.json", R"({"quantization_config": null})");
  std::filesystem::remove(folder.path() + "/" + json);
  folder.expect_refused({"mistyped", "I8 instead of BF16"});
}

TEST(Dialects, BadTensorsOfStaticLinearsAreRefused) {
  const std::string shard = "quant_model_weights.safetensors";
  const auto refused = [&](const std::string& name, auto change,
                           const std::vector<std::string>& needles) {
    SCOPED_TRACE(name);
    const Folder folder(TestDialect::kSlimStaticPacked);
    rewrite(folder, shard, [&](DialectTensors& tensors) { change(named(tensors, kOProj + name)); });
    folder.expect_refused(needles);
  };
  const auto set = [](auto value, size_t at = 0) {
    return [value, at](DialectTensor& t) {
      std::memcpy(t.bytes.data() + at * sizeof value, &value, sizeof value);
    };
  };
  refused(".input_scale", set(to_bf16(0.0f)), {kOProj + ".input_scale: is 0"});
  refused(".input_scale", set(to_bf16(NAN)), {kOProj + ".input_scale: is nan"});
  refused(".input_offset", set(to_bf16(130.0f)), {kOProj + ".input_offset: is 130"});
  refused(".input_offset", set(to_bf16(1.5f)), {kOProj + ".input_offset: is 1.5"});
  refused(".quant_bias", set(int32_t{INT32_MIN}, 5), {kOProj + ".quant_bias: element 5"});
  refused(".deq_scale", set(int64_t{0x100000000}, 9), {kOProj + ".deq_scale: element 9"});
  refused(".deq_scale", set(int64_t{0x7fc00000}), {kOProj + ".deq_scale: element 0"});
  refused(".deq_scale", [](DialectTensor& t) { t.name += "s"; },
          {"1 missing: " + kOProj + ".deq_scale", "1 unexpected: " + kOProj + ".deq_scales"});

  const Folder dynamic(TestDialect::kSlimDynamic);
  rewrite(dynamic, "quant_model_weight_w8a8_dynamic.safetensors", [&](DialectTensors& tensors) {
    DialectTensor& offset = named(tensors, kOProj + ".weight_offset");
    offset.bytes[3] = 0x40;
  });
  dynamic.expect_refused({kOProj + ".weight_offset", "asymmetric weights are not supported"});
}

TEST(Dialects, CompressedTensorsThatContradictTheirConfig) {
  const Folder channel(TestDialect::kCompressedChannel);
  channel.patch("config.json", R"({"quantization_config": {"ignore": [")" + kOProj + R"("]}})");
  channel.expect_refused({kOProj + ".weight is I8, though config.json's \"ignore\" names it"});
  const Folder tensor(TestDialect::kCompressedTensor);
  rewrite(tensor, "model.safetensors", [](DialectTensors& tensors) {
    std::erase_if(tensors,
                  [](const DialectTensor& t) { return t.name == kOProj + ".input_scale"; });
  });
  tensor.expect_refused({"1 missing: " + kOProj + ".input_scale"});
  tensor.patch("config.json", R"({"quantization_config": {"config_groups": {"group_0":
      {"input_activations": {"strategy": "token", "dynamic": true}}}}})");
  tensor.expect_refused({"unexpected", ".input_scale"});
  tensor.patch("config.json", R"({"quantization_config": {"config_groups": {"group_0":
      {"input_activations": {"symmetric": false}}}}})");
  tensor.expect_refused({"symmetric false", "not supported"});
}

// Every truncation of a good text, and values of every type, give a result or a sentence.
TEST(QuantDescription, AnyTextIsReadOrRefused) {
  const std::string good =
      R"({"model_quant_type": "W8A8", "a.weight": "W8A8", "a.deq_scale": "W8A8",)"
      R"( "b.weight": "W8A8_DYNAMIC", "c.weight": "FLOAT", "optional": {"x": []}})";
  const auto d = parse_quant_description(good, "d.json");
  ASSERT_TRUE(d.is_ok()) << d.status().message();
  EXPECT_EQ(d->size(), 3u);
  EXPECT_EQ(d->at("a"), SlimScheme::kW8A8Static);
  EXPECT_EQ(d->at("b"), SlimScheme::kW8A8Dynamic);
  EXPECT_EQ(d->at("c"), SlimScheme::kFloat);
  for (size_t n = 0; n < good.size(); ++n) {
    const auto cut = parse_quant_description(good.substr(0, n), "d.json");
    ASSERT_FALSE(cut.is_ok()) << n;
    EXPECT_NE(cut.status().message().find("d.json"), std::string::npos);
  }
  for (const char* value : {"null", "1", "true", "[]", "{}", "\"w8a8\"", "\"\\ud800\""}) {
    const std::string text = std::string(R"({"a.weight": )") + value + "}";
    EXPECT_FALSE(parse_quant_description(text, "d.json").is_ok()) << value;
  }
}

}  // namespace
}  // namespace sortie::model
