#include "model/quantize.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "base/fork_test_util.h"
#include "base/memory.h"
#include "base/scalar.h"
#include "model/config.h"
#include "model/quantize_plan.h"
#include "model/random_checkpoint.h"
#include "model/safetensors.h"

namespace sortie::model {
namespace {

namespace fs = std::filesystem;
const std::string kMini = std::string(SORTIE_SOURCE_DIR) + "/models/mini";
const std::string kFormats = std::string(SORTIE_SOURCE_DIR) + "/tests/data/formats/";

std::string read_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

void write_file(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

std::unique_ptr<Checkpoint> open(const std::string& folder) {
  auto checkpoint = Checkpoint::open(folder);
  EXPECT_TRUE(checkpoint.is_ok()) << checkpoint.status().message();
  return std::move(checkpoint.value());
}

std::string bytes_of(const Tensor& t) {
  return {reinterpret_cast<const char*>(t.data), static_cast<size_t>(t.bytes())};
}

std::vector<int64_t> shape_of(const Tensor& t) {
  return {t.shape.begin(), t.shape.begin() + t.rank};
}

// The largest activations of the published calibration, back from the scales it gave.
std::vector<std::vector<std::array<float, 2>>> published_amax() {
  const auto published = open(kFormats + "w4afp8");
  std::vector<std::vector<std::array<float, 2>>> amax(2);
  for (int e = 0; e < 8; ++e) {
    const std::string prefix = fmt::format("model.layers.1.mlp.experts.{}", e);
    const auto scale = [&](const char* w) {
      return load_unaligned<float>(published->find(prefix + w + ".input_scale")->data);
    };
    amax[1].push_back({scale(".w1") * 448, scale(".w2") * 448});
  }
  return amax;
}

class QuantizeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string name = ::testing::UnitTest::GetInstance()->current_test_info()->name();
    root_ =
        fs::temp_directory_path() / ("sortie-quantize-" + name + "-" + std::to_string(getpid()));
    fs::remove_all(root_);
    fs::create_directories(root_);
    options_ = {.in = kFormats + "bf16", .out = out(), .quiet = true};
  }
  void TearDown() override { fs::remove_all(root_); }

  std::string out() const { return (root_ / "out").string(); }
  fs::path path(const std::string& name) const { return root_ / "out" / name; }
  Status quantize(Quantization format) {
    options_.format = format;
    return quantize_checkpoint(options_);
  }
  // A copy of the bf16 folder that a test may damage.
  std::string copy_of_bf16() {
    const fs::path to = root_ / "in";
    fs::copy(kFormats + "bf16", to, fs::copy_options::recursive);
    options_.in = to.string();
    return to.string();
  }
  void shard_mini(int shards) { shard(kMini, shards); }
  // A folder of another model, in so many shards.
  void shard(const std::string& model, int shards) {
    const fs::path in = root_ / "in";
    fs::create_directories(in / "folder");
    const auto source = open(model);
    nlohmann::json index;
    for (int shard = 0; shard < shards; ++shard) {
      const std::string file = fmt::format("model-{:05}-of-{:05}.safetensors", shard + 1, shards);
      SafetensorsWriter writer;
      std::vector<const Tensor*> tensors;
      size_t i = 0;
      for (const auto& [name, entry] : source->tensors()) {
        if (static_cast<int>(i++ * static_cast<size_t>(shards) / source->tensors().size()) != shard)
          continue;
        writer.declare(name, entry.tensor.dtype, shape_of(entry.tensor));
        tensors.push_back(&entry.tensor);
        index["weight_map"][name] = file;
      }
      ASSERT_TRUE(writer.open((in / file).string()).is_ok());
      for (const Tensor* t : tensors) ASSERT_TRUE(writer.write(t->data, t->bytes()).is_ok());
      ASSERT_TRUE(writer.finish().is_ok());
    }
    write_file(in / "model.safetensors.index.json", index.dump());
    for (const char* name : {"config.json", "tokenizer.json", "generation_config.json"}) {
      if (fs::exists(fs::path(model) / name)) fs::copy_file(fs::path(model) / name, in / name);
    }
    options_.in = in.string();
  }
  // The output's shard i of n, counted from 1, while it is under the temporary name.
  fs::path partial_shard(int i, int n) const {
    return out() + fmt::format(".partial/model-{:05}-of-{:05}.safetensors", i, n);
  }
  // A run that ends behind the second tensor of the second of `shards` shards: stopped, or as `end`
  // does it.
  void quantize_one_shard_of(
      int shards, Quantization format, const std::function<bool()>& end = [] { return true; }) {
    int asked = 0;
    options_.stop = [&] { return fs::exists(partial_shard(1, shards)) && ++asked == 3 && end(); };
    const Status status = quantize(format);
    options_.stop = nullptr;
    ASSERT_EQ(status.code(), StatusCode::kCancelled) << status.message();
    EXPECT_NE(status.message().find(fmt::format("1 of {} shards are whole", shards)),
              std::string::npos)
        << status.message();
    ASSERT_TRUE(fs::exists(partial_shard(1, shards)));
    ASSERT_FALSE(fs::exists(partial_shard(2, shards)));
    ASSERT_FALSE(fs::exists(out()));
  }
  // Nothing under the final or the temporary name.
  void expect_nothing_left() {
    EXPECT_FALSE(fs::exists(out()));
    EXPECT_FALSE(fs::exists(out() + ".partial"));
  }

  fs::path root_;
  QuantizeOptions options_;
};

TEST_F(QuantizeTest, Fp8BlockIsThePublishedFolderByteForByte) {
  const Status status = quantize(Quantization::kFp8Block);
  ASSERT_TRUE(status.is_ok()) << status.message();
  for (const char* name : {"model.safetensors", "config.json"}) {
    EXPECT_TRUE(read_file(path(name)) == read_file(kFormats + "fp8_block/" + name)) << name;
  }
  EXPECT_EQ(load_config(out())->dialect, Dialect::kFp8Block);
}

TEST_F(QuantizeTest, W4Afp8WithDenseFp8IsThePublishedFolderByteForByte) {
  options_.dense_fp8_block = true;
  options_.expert_amax = published_amax();
  options_.threads = 2;
  const Status status = quantize(Quantization::kW4Afp8);
  ASSERT_TRUE(status.is_ok()) << status.message();
  for (const char* name : {"model.safetensors", "config.json", "hf_quant_config.json"}) {
    EXPECT_TRUE(read_file(path(name)) == read_file(kFormats + "w4afp8/" + name)) << name;
  }
  EXPECT_EQ(load_config(out())->dialect, Dialect::kW4Afp8);
}

TEST_F(QuantizeTest, W8A8IsThePublishedOneButForKvB) {
  ASSERT_TRUE(quantize(Quantization::kW8A8Int8).is_ok());
  const auto written = open(out());
  const auto published = open(kFormats + "w8a8_compressed_tensors");
  const auto source = open(kFormats + "bf16");
  std::set<std::string> kv_b;
  for (const auto& [name, entry] : published->tensors()) {
    if (name.find("kv_b_proj") != std::string::npos) {
      kv_b.insert(name);
      continue;
    }
    const Tensor* t = written->find(name);
    ASSERT_NE(t, nullptr) << name;
    EXPECT_EQ(t->dtype, entry.tensor.dtype) << name;
    EXPECT_EQ(shape_of(*t), shape_of(entry.tensor)) << name;
    EXPECT_TRUE(bytes_of(*t) == bytes_of(entry.tensor)) << name;
  }
  EXPECT_EQ(kv_b.size(), 4u);  // weight and scale of two layers
  EXPECT_EQ(written->tensors().size(), published->tensors().size() - 2);
  for (const char* layer : {"0", "1"}) {
    const std::string name = fmt::format("model.layers.{}.self_attn.kv_b_proj.weight", layer);
    EXPECT_EQ(written->find(name)->dtype, DType::kBf16);
    EXPECT_TRUE(bytes_of(*written->find(name)) == bytes_of(*source->find(name)));
  }
  // config.json differs by the ignored modules alone.
  auto ours = nlohmann::ordered_json::parse(read_file(path("config.json")));
  auto theirs =
      nlohmann::ordered_json::parse(read_file(kFormats + "w8a8_compressed_tensors/config.json"));
  const nlohmann::ordered_json expected = {"lm_head", "model.layers.0.self_attn.kv_b_proj",
                                           "model.layers.1.mlp.gate",
                                           "model.layers.1.self_attn.kv_b_proj"};
  EXPECT_EQ(ours["quantization_config"]["ignore"], expected);
  theirs["quantization_config"]["ignore"] = expected;
  EXPECT_EQ(ours.dump(), theirs.dump());
  EXPECT_EQ(load_config(out())->dialect, Dialect::kCompressedTensorsInt8);
}

// Names, types and shapes of the published form (docs/formats.md), spelt out once.
TEST_F(QuantizeTest, W4Afp8NamesTypesAndShapes) {
  ASSERT_TRUE(quantize(Quantization::kW4Afp8).is_ok());
  const auto written = open(out());
  const auto source = open(options_.in);
  int experts = 0;
  for (const auto& [name, entry] : written->tensors()) {
    if (name.find(".mlp.experts.") == std::string::npos) {  // as in the source
      ASSERT_NE(source->find(name), nullptr) << name;
      EXPECT_EQ(entry.tensor.dtype, source->find(name)->dtype) << name;
      EXPECT_TRUE(bytes_of(entry.tensor) == bytes_of(*source->find(name))) << name;
      continue;
    }
    const bool down = name.find("down_proj") != std::string::npos;
    const bool scale = name.ends_with(".weight_scale_inv");
    EXPECT_TRUE(scale || name.ends_with("_proj.weight")) << name;  // no input_scale: dynamic
    EXPECT_EQ(entry.tensor.dtype, scale ? DType::kF32 : DType::kI8) << name;
    const int64_t n = down ? 256 : 128;
    const int64_t k = down ? 128 : 256;
    EXPECT_EQ(shape_of(entry.tensor), (std::vector<int64_t>{n, scale ? k / 128 : k / 2})) << name;
    ++experts;
  }
  EXPECT_EQ(experts, 8 * 3 * 2);
}

TEST_F(QuantizeTest, AnExpertWithoutTokensGetsItsLayersLargestAndOtherLayersNone) {
  options_.expert_amax = {{}, std::vector<std::array<float, 2>>(8, {1.0f, 3.0f})};
  options_.expert_amax[1][2] = {0, 0};
  options_.expert_amax[1][5] = {7.0f, 2.0f};
  ASSERT_TRUE(quantize(Quantization::kW4Afp8).is_ok());
  const auto written = open(out());
  const auto scale = [&](int expert, const char* w) {
    const Tensor* t =
        written->find(fmt::format("model.layers.1.mlp.experts.{}.{}.input_scale", expert, w));
    EXPECT_EQ(t->dtype, DType::kF32);
    EXPECT_EQ(shape_of(*t), std::vector<int64_t>{1});
    return load_unaligned<float>(t->data);
  };
  EXPECT_EQ(scale(0, "w1"), round_to_bf16(1.0f / 448.0f));
  EXPECT_EQ(scale(0, "w2"), round_to_bf16(3.0f / 448.0f));
  EXPECT_EQ(scale(2, "w1"), round_to_bf16(7.0f / 448.0f));
  EXPECT_EQ(scale(2, "w3"), round_to_bf16(7.0f / 448.0f));
  EXPECT_EQ(scale(2, "w2"), round_to_bf16(3.0f / 448.0f));
}

// The official checkpoints are fp8: experts come from the bf16 rounding of the dequantised weights,
// all else stays byte for byte.
TEST_F(QuantizeTest, W4Afp8FromFp8Block) {
  options_.in = kFormats + "fp8_block";
  ASSERT_TRUE(quantize(Quantization::kW4Afp8).is_ok());
  const auto written = open(out());
  const auto fp8 = open(options_.in);
  const auto reference = open(kFormats + "w4afp8");
  size_t scales = 0;
  for (const auto& [name, entry] : reference->tensors()) scales += name.ends_with("input_scale");
  EXPECT_EQ(written->tensors().size(), reference->tensors().size() - scales);
  for (const auto& [name, entry] : written->tensors()) {
    if (name.find(".mlp.experts.") == std::string::npos) {
      EXPECT_TRUE(bytes_of(entry.tensor) == bytes_of(*fp8->find(name))) << name;
    }
  }
  // One group by hand: expert 3's up_proj, row 5, columns 128..255 (group 1 of the row).
  const std::string name = "model.layers.1.mlp.experts.3.up_proj.weight";
  const auto* codes = reinterpret_cast<const uint8_t*>(fp8->find(name)->data) + 5 * 256 + 128;
  const float block = load_unaligned<float>(fp8->find(name + "_scale_inv")->data + 4);
  float w[128];
  float amax = 0;
  for (int i = 0; i < 128; ++i) {
    w[i] = round_to_bf16(to_float(e4m3{codes[i]}) * block);
    amax = std::max(amax, std::fabs(w[i]));
  }
  const auto* q = reinterpret_cast<const uint8_t*>(written->find(name)->data) + 5 * 128 + 64;
  EXPECT_EQ(load_unaligned<float>(written->find(name + "_scale_inv")->data + (5 * 2 + 1) * 4),
            amax / 7.0f);
  for (int i = 0; i < 128; ++i) {
    const int code = i % 2 == 0 ? int4_low(q[i / 2]) : int4_high(q[i / 2]);
    EXPECT_EQ(code, static_cast<int>(std::nearbyint(w[i] / (amax / 7.0f)))) << i;
  }
  EXPECT_EQ(load_config(out())->dialect, Dialect::kW4Afp8);
}

TEST_F(QuantizeTest, W8A8FromFp8BlockWidensKvB) {
  options_.in = kFormats + "fp8_block";
  ASSERT_TRUE(quantize(Quantization::kW8A8Int8).is_ok());
  const auto written = open(out());
  const std::string name = "model.layers.1.self_attn.kv_b_proj.weight";
  ASSERT_EQ(written->find(name)->dtype, DType::kBf16);
  EXPECT_EQ(written->find(name + "_scale_inv"), nullptr);
  const auto fp8 = open(options_.in);
  const auto* codes = reinterpret_cast<const uint8_t*>(fp8->find(name)->data);
  for (int64_t i : {0, 1000, 40000, 65535}) {
    const float s = load_unaligned<float>(fp8->find(name + "_scale_inv")->data + i / 16384 * 4);
    EXPECT_EQ(load_unaligned<bf16>(written->find(name)->data + 2 * i).bits,
              to_bf16(to_float(e4m3{codes[i]}) * s).bits);
  }
}

TEST_F(QuantizeTest, APowerOfTwoSourceKeepsSayingSo) {
  const std::string in = (root_ / "in").string();
  fs::copy(kFormats + "fp8_block", in, fs::copy_options::recursive);
  auto config = nlohmann::json::parse(read_file(in + "/config.json"));
  config["quantization_config"]["scale_fmt"] = "ue8m0";
  write_file(in + "/config.json", config.dump());
  options_.in = in;
  ASSERT_TRUE(quantize(Quantization::kW4Afp8).is_ok());
  const auto written = load_config(out());
  EXPECT_EQ(written->dialect, Dialect::kW4Afp8);
  EXPECT_TRUE(written->ue8m0_scales);
}

// Two shards, cut between an expert's scale and its neighbours; an MTP layer; a tokenizer.
TEST_F(QuantizeTest, ShardsMtpAndOtherFiles) {
  shard_mini(2);
  const auto source = open(kMini);
  const auto index =
      nlohmann::json::parse(read_file(fs::path(options_.in) / "model.safetensors.index.json"));
  ASSERT_TRUE(quantize(Quantization::kW4Afp8).is_ok());

  const auto written = open(out());
  EXPECT_EQ(written->shard_paths().size(), 2u);
  EXPECT_EQ(read_file(path("tokenizer.json")), read_file(kMini + "/tokenizer.json"));
  EXPECT_TRUE(fs::exists(path("generation_config.json")));
  EXPECT_FALSE(fs::exists(path("folder")));
  const auto map = nlohmann::json::parse(read_file(path("model.safetensors.index.json")));
  EXPECT_EQ(map["weight_map"].size(), written->tensors().size());
  EXPECT_EQ(map["metadata"]["total_size"], written->bytes());
  for (const auto& [name, entry] : source->tensors()) {
    EXPECT_EQ(map["weight_map"][name], index["weight_map"][name]) << name;
    if (map["weight_map"].contains(name + "_scale_inv")) {
      EXPECT_EQ(map["weight_map"][name + "_scale_inv"], index["weight_map"][name]) << name;
    }
  }
  EXPECT_EQ(written->find("model.layers.6.mlp.experts.3.up_proj.weight")->dtype, DType::kI8);
  EXPECT_EQ(written->find("model.layers.6.eh_proj.weight")->dtype, DType::kBf16);

  // The same in one file holds the same bytes.
  const auto one = QuantizeOptions{
      .in = kMini, .out = (root_ / "one").string(), .format = Quantization::kW4Afp8, .quiet = true};
  ASSERT_TRUE(quantize_checkpoint(one).is_ok());
  const auto single = open(one.out);
  ASSERT_EQ(single->tensors().size(), written->tensors().size());
  for (const auto& [name, entry] : single->tensors()) {
    EXPECT_TRUE(bytes_of(entry.tensor) == bytes_of(*written->find(name))) << name;
  }
}

TEST_F(QuantizeTest, W8A8TakesMtpLinearsAndNamesEhProj) {
  options_.in = kMini;
  ASSERT_TRUE(quantize(Quantization::kW8A8Int8).is_ok());
  const auto written = open(out());
  EXPECT_EQ(written->find("model.layers.6.self_attn.o_proj.weight")->dtype, DType::kI8);
  EXPECT_EQ(written->find("model.layers.6.eh_proj.weight")->dtype, DType::kBf16);
  const auto ignore = load_config(out())->quant_ignore;
  const std::set<std::string> names(ignore.begin(), ignore.end());
  EXPECT_EQ(names.size(), ignore.size());
  EXPECT_EQ(names.count("model.layers.6.eh_proj"), 1u);
  // Exactly the ignored modules (of rank 2, but for the embedding) are not int8.
  for (const auto& [name, entry] : written->tensors()) {
    if (entry.tensor.rank != 2 || !name.ends_with(".weight") || name.find("embed") != name.npos) {
      continue;
    }
    const std::string module = name.substr(0, name.size() - 7);
    EXPECT_EQ(entry.tensor.dtype == DType::kI8, names.count(module) == 0) << name;
  }
}

TEST_F(QuantizeTest, OutputFolderMayBeEmptyButNotFull) {
  fs::create_directories(out());
  options_.out = out() + "/";
  EXPECT_TRUE(quantize(Quantization::kFp8Block).is_ok());
  const std::string before = read_file(path("model.safetensors"));
  const Status again = quantize(Quantization::kW8A8Int8);
  EXPECT_EQ(again.code(), StatusCode::kUsage);
  EXPECT_NE(again.message().find("not an empty folder"), std::string::npos) << again.message();
  EXPECT_TRUE(read_file(path("model.safetensors")) == before);
  EXPECT_FALSE(fs::exists(out() + ".partial"));
}

TEST_F(QuantizeTest, ClearsItsOwnLeftoversOnly) {
  fs::create_directories(out() + ".partial");
  write_file(out() + ".partial/thesis.txt", "years of work");
  EXPECT_EQ(quantize(Quantization::kFp8Block).code(), StatusCode::kUsage);
  EXPECT_EQ(read_file(out() + ".partial/thesis.txt"), "years of work");
  write_file(out() + ".partial/.sortie-quantize-unfinished", "");
  EXPECT_TRUE(quantize(Quantization::kFp8Block).is_ok());
  EXPECT_FALSE(fs::exists(out() + ".partial"));
  EXPECT_FALSE(fs::exists(path(".sortie-quantize-unfinished")));
  EXPECT_FALSE(fs::exists(path("thesis.txt")));
}

TEST_F(QuantizeTest, WrongOptionsAreUsageErrors) {
  EXPECT_EQ(quantize(Quantization::kNone).code(), StatusCode::kUsage);
  options_.dense_fp8_block = true;
  EXPECT_EQ(quantize(Quantization::kW8A8Int8).code(), StatusCode::kUsage);
  options_.dense_fp8_block = false;
  options_.expert_amax = published_amax();
  EXPECT_EQ(quantize(Quantization::kFp8Block).code(), StatusCode::kUsage);
  options_.expert_amax.clear();
  for (const char* in : {"w4afp8", "w8a8_compressed_tensors"}) {
    options_.in = kFormats + in;
    const Status status = quantize(Quantization::kW4Afp8);
    EXPECT_EQ(status.code(), StatusCode::kUsage);
    EXPECT_NE(status.message().find("quantised already"), std::string::npos);
  }
  options_.in = kFormats + "fp8_block";
  EXPECT_EQ(quantize(Quantization::kFp8Block).code(), StatusCode::kUsage);
  options_.in = kFormats + "nowhere";
  EXPECT_FALSE(quantize(Quantization::kFp8Block).is_ok());
  expect_nothing_left();
}

TEST_F(QuantizeTest, BadCalibrationIsRefused) {
  options_.expert_amax = {{}, std::vector<std::array<float, 2>>(8, {0.0f, 0.0f})};
  EXPECT_EQ(quantize(Quantization::kW4Afp8).code(), StatusCode::kInvalid);
  options_.expert_amax = {{}, std::vector<std::array<float, 2>>(8, {NAN, 1.0f})};
  EXPECT_EQ(quantize(Quantization::kW4Afp8).code(), StatusCode::kInvalid);
  expect_nothing_left();
}

TEST_F(QuantizeTest, NanInTheSourceNamesItsTensorAndLeavesNothing) {
  const std::string in = copy_of_bf16();
  const std::string name = "model.layers.1.mlp.experts.4.up_proj.weight";
  std::streamoff at = 0;
  {
    const auto source = open(in);
    at = static_cast<std::streamoff>(read_file(in + "/model.safetensors").size()) -
         (source->find("model.norm.weight")->data + 512 - source->find(name)->data);
  }
  std::fstream file(in + "/model.safetensors", std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(at);
  file.write("\xc0\x7f", 2);
  file.close();
  for (Quantization q : {Quantization::kW4Afp8, Quantization::kFp8Block, Quantization::kW8A8Int8}) {
    const Status status = quantize(q);
    EXPECT_EQ(status.code(), StatusCode::kInvalid);
    EXPECT_NE(status.message().find(name), std::string::npos) << status.message();
    expect_nothing_left();
  }
}

TEST_F(QuantizeTest, AFullDiskLeavesNothing) {
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{.rlim_cur = 1 << 20, .rlim_max = before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  const Status status = quantize(Quantization::kFp8Block);
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_FALSE(status.is_ok());
  EXPECT_NE(status.message().find("model.safetensors"), std::string::npos) << status.message();
  expect_nothing_left();
}

TEST_F(QuantizeTest, StoppingLeavesNothing) {
  options_.stop = [] { return true; };
  EXPECT_EQ(quantize(Quantization::kFp8Block).code(), StatusCode::kCancelled);
  expect_nothing_left();
}

std::map<std::string, std::string> files_of(const fs::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& file : fs::directory_iterator(folder)) {
    files[file.path().filename().string()] = read_file(file.path());
  }
  return files;
}

// SIGKILL in the middle; the same command then makes what is missing, and no whole shard again.
TEST_F(QuantizeTest, AKilledRunGoesOnBehindItsWholeShards) {
  shard_mini(4);
  ASSERT_TRUE(quantize(Quantization::kW4Afp8).is_ok());
  const auto expected = files_of(out());
  fs::remove_all(out());
  const pid_t child = fork();
  if (child == 0) {
    quantize_one_shard_of(4, Quantization::kW4Afp8, [] { return kill(getpid(), SIGKILL) == 0; });
    _exit(0);
  }
  int how = 0;
  ASSERT_EQ(waitpid(child, &how, 0), child);
  ASSERT_TRUE(WIFSIGNALED(how) && WTERMSIG(how) == SIGKILL);
  const fs::path first = partial_shard(1, 4);
  ASSERT_FALSE(fs::exists(partial_shard(2, 4)));
  const auto written = fs::last_write_time(first);
  struct stat before {};
  ASSERT_EQ(stat(first.c_str(), &before), 0);
  ASSERT_TRUE(quantize(Quantization::kW4Afp8).is_ok());
  struct stat after {};
  const fs::path there = path(first.filename());
  ASSERT_EQ(stat(there.c_str(), &after), 0);
  EXPECT_EQ(after.st_ino, before.st_ino);
  EXPECT_EQ(fs::last_write_time(there), written);
  EXPECT_TRUE(files_of(out()) == expected);
  EXPECT_FALSE(fs::exists(out() + ".partial"));
}

// A run that ended while it copied the other files leaves a piece of one.
TEST_F(QuantizeTest, HalfCopiedFilesAreCopiedAgain) {
  shard_mini(2);
  ASSERT_TRUE(quantize(Quantization::kW4Afp8).is_ok());
  const auto expected = files_of(out());
  fs::remove_all(out());
  quantize_one_shard_of(2, Quantization::kW4Afp8);
  write_file(out() + ".partial/tokenizer.json", "half");
  ASSERT_TRUE(quantize(Quantization::kW4Afp8).is_ok());
  EXPECT_TRUE(files_of(out()) == expected);
}

// A whole shard that was damaged since is made again.
TEST_F(QuantizeTest, DamagedShardsAreMadeAgain) {
  shard_mini(2);
  ASSERT_TRUE(quantize(Quantization::kW4Afp8).is_ok());
  const auto expected = files_of(out());
  fs::remove_all(out());
  quantize_one_shard_of(2, Quantization::kW4Afp8);
  const fs::path shard = partial_shard(1, 2);
  std::string bytes = read_file(shard);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_file(shard, bytes);
  ASSERT_TRUE(quantize(Quantization::kW4Afp8).is_ok());
  EXPECT_TRUE(files_of(out()) == expected);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // their shadow is memory too
// However large the model is.
TEST_F(QuantizeTest, PeakMemoryIsAboutOneShard) {
  Config config = *load_config(kMini);
  config.vocab_size = 1024;
  config.hidden_size = config.moe_intermediate_size = 512;
  config.num_hidden_layers = 3;
  const fs::path whole = root_ / "whole";
  fs::create_directories(whole);
  ASSERT_TRUE(write_random_checkpoint(whole.string(), config, Dialect::kBf16, 1).is_ok());
  shard(whole.string(), 12);
  fs::remove_all(whole);
  int64_t all = 0;
  int64_t largest = 0;
  const auto source = open(options_.in);
  for (const std::string& path : source->shard_paths()) {
    const auto bytes = static_cast<int64_t>(fs::file_size(path));
    all += bytes;
    largest = std::max(largest, bytes);
  }
  const int64_t bound = largest + largest / 2;
  ASSERT_GT(all, 5 * bound);
  options_.report = (root_ / "report.json").string();
  for (Quantization q : {Quantization::kW4Afp8, Quantization::kFp8Block, Quantization::kW8A8Int8}) {
    const int64_t taken = in_child([&]() -> int64_t {
      const int64_t before = resident_bytes();
      return quantize(q).is_ok() ? peak_resident_bytes() - before : -1;
    });
    EXPECT_GT(taken, 0);
    EXPECT_LT(taken, bound) << "of " << all << " bytes in shards of " << largest;
    fs::remove_all(out());
  }
}
#endif

TEST_F(QuantizeTest, AReportThatCannotBeWrittenIsRefusedFirst) {
  options_.report = (root_ / "nowhere/report.json").string();
  const Status status = quantize(Quantization::kFp8Block);
  EXPECT_NE(status.message().find("nowhere/report.json"), std::string::npos) << status.message();
  expect_nothing_left();
}

// What another command left is not mixed with this one's.
TEST_F(QuantizeTest, LeftoversOfOtherOptionsAreMadeAgain) {
  shard_mini(2);
  ASSERT_TRUE(quantize(Quantization::kW4Afp8).is_ok());
  const auto expected = files_of(out());
  fs::remove_all(out());
  const fs::path partial = out() + ".partial";
  fs::create_directories(partial);
  write_file(partial / "model-00001-of-00002.safetensors", "of another kind");
  write_file(partial / ".sortie-quantize-unfinished",
             "0123456789abcdef\nmodel-00001-of-00002.safetensors\n");
  ASSERT_TRUE(quantize(Quantization::kW4Afp8).is_ok());
  EXPECT_TRUE(files_of(out()) == expected);
}

TEST_F(QuantizeTest, AStoppedRunKeepsWholeShards) {
  shard_mini(4);
  ASSERT_TRUE(quantize(Quantization::kW8A8Int8).is_ok());
  const auto expected = files_of(out());
  fs::remove_all(out());
  quantize_one_shard_of(4, Quantization::kW8A8Int8);
  EXPECT_TRUE(quantize(Quantization::kW8A8Int8).is_ok());
  EXPECT_TRUE(files_of(out()) == expected);
}

// By group, the searched scale leaves no more error than the nearest one; all in all clearly less.
TEST_F(QuantizeTest, SearchedScalesLowerTheReportedDistortion) {
  options_.in = kMini;
  options_.report = (root_ / "report.json").string();
  ASSERT_TRUE(quantize(Quantization::kW4Afp8).is_ok());
  const auto nearest = nlohmann::json::parse(read_file(options_.report));
  fs::remove_all(out());
  options_.rounding = quant::Rounding::kSearch;
  ASSERT_TRUE(quantize(Quantization::kW4Afp8).is_ok());
  const auto searched = nlohmann::json::parse(read_file(options_.report));
  ASSERT_EQ(searched["matrices"].size(), nearest["matrices"].size());
  ASSERT_GT(nearest["matrices"].size(), 0u);
  for (size_t i = 0; i < nearest["matrices"].size(); ++i) {
    EXPECT_LT(searched["matrices"][i]["relative_squared_error"].get<double>(),
              nearest["matrices"][i]["relative_squared_error"].get<double>());
  }
  const double before = nearest["all"]["relative_squared_error"].get<double>();
  const double after = searched["all"]["relative_squared_error"].get<double>();
  RecordProperty("ratio", std::to_string(after / before));
  EXPECT_LT(after, 0.95 * before);
  EXPECT_GT(after, 0.3 * before);
  EXPECT_NEAR(before, 0.01, 0.01);  // 4 bits: about a hundredth of the energy
}

TEST_F(QuantizeTest, LinksOutOfTheFolderAreNotFollowed) {
  const std::string in = copy_of_bf16();
  write_file(root_ / "secret", "s");
  fs::create_symlink(root_ / "secret", fs::path(in) / "tokenizer.json");
  const Status status = quantize(Quantization::kFp8Block);
  EXPECT_EQ(status.code(), StatusCode::kInvalid);
  EXPECT_NE(status.message().find("link that leaves"), std::string::npos) << status.message();
  expect_nothing_left();
}

}  // namespace
}  // namespace sortie::model
