// The quantisers against published checkpoints: tests/data/formats holds one model in bf16 and in
// three quantised forms that another program wrote. Every byte must come out the same.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "quant/fp8_block.h"
#include "quant/w4afp8.h"
#include "quant/w8a8_int8.h"

namespace sortie::quant {
namespace {

struct FileTensor {
  std::string dtype;
  std::vector<int64_t> shape;
  std::vector<char> bytes;
  template <typename T>
  std::vector<T> as() const {
    std::vector<T> out(bytes.size() / sizeof(T));
    std::memcpy(out.data(), bytes.data(), out.size() * sizeof(T));
    return out;
  }
};

// Enough of safetensors for our own test files: u64 header size, JSON header, data.
std::map<std::string, FileTensor> load(const std::string& folder) {
  std::ifstream in(
      std::string(SORTIE_SOURCE_DIR) + "/tests/data/formats/" + folder + "/model.safetensors",
      std::ios::binary);
  uint64_t size = 0;
  in.read(reinterpret_cast<char*>(&size), sizeof size);
  std::string header(size, ' ');
  in.read(header.data(), static_cast<std::streamsize>(size));
  std::map<std::string, FileTensor> tensors;
  const auto entries = nlohmann::json::parse(header);
  for (const auto& [name, entry] : entries.items()) {
    if (name == "__metadata__") continue;
    const auto offsets = entry["data_offsets"].get<std::vector<size_t>>();
    FileTensor& t = tensors[name];
    t.dtype = entry["dtype"];
    t.shape = entry["shape"].get<std::vector<int64_t>>();
    t.bytes.resize(offsets[1] - offsets[0]);
    in.seekg(static_cast<std::streamoff>(8 + size + offsets[0]));
    in.read(t.bytes.data(), static_cast<std::streamsize>(t.bytes.size()));
  }
  EXPECT_TRUE(in.good());
  return tensors;
}

std::vector<float> widen(const FileTensor& t) {
  const auto narrow = t.as<bf16>();
  std::vector<float> out(narrow.size());
  std::transform(narrow.begin(), narrow.end(), out.begin(), [](bf16 v) { return to_float(v); });
  return out;
}

bool is_routed_expert(const std::string& name) {
  return name.find(".mlp.experts.") != std::string::npos;
}

TEST(Published, Fp8BlockBytesAreReproduced) {
  const auto source = load("bf16");
  const auto published = load("fp8_block");
  int compared = 0;
  for (const auto& [name, t] : published) {
    if (t.dtype != "F8_E4M3") continue;
    const int64_t n = t.shape[0];
    const int64_t k = t.shape[1];
    std::vector<uint8_t> codes(static_cast<size_t>(n * k));
    std::vector<float> scales(static_cast<size_t>(fp8_block::scale_count(n, k)));
    fp8_block::quantise(widen(source.at(name)).data(), n, k, codes.data(), scales.data());
    EXPECT_EQ(codes, t.as<uint8_t>()) << name;
    EXPECT_EQ(scales, published.at(name + "_scale_inv").as<float>()) << name;
    ++compared;
  }
  EXPECT_EQ(compared, 40);
}

// The published int4 experts came from the bf16 weights, not from their fp8 form.
TEST(Published, W4Afp8ExpertBytesAreReproduced) {
  const auto source = load("bf16");
  const auto published = load("w4afp8");
  int compared = 0;
  for (const auto& [name, t] : published) {
    if (t.dtype != "I8") continue;
    EXPECT_TRUE(is_routed_expert(name));
    const FileTensor& w = source.at(name);
    const int64_t n = w.shape[0];
    const int64_t k = w.shape[1];
    std::vector<uint8_t> codes(static_cast<size_t>(n * w4afp8::row_bytes(k)));
    std::vector<float> scales(static_cast<size_t>(w4afp8::scale_count(n, k)));
    w4afp8::quantise(widen(w).data(), n, k, codes.data(), scales.data());
    EXPECT_EQ(codes, t.as<uint8_t>()) << name;
    EXPECT_EQ(scales, published.at(name + "_scale_inv").as<float>()) << name;
    ++compared;
  }
  EXPECT_EQ(compared, 24);
}

TEST(Published, W8A8Int8BytesAreReproduced) {
  const auto source = load("bf16");
  const auto published = load("w8a8_compressed_tensors");
  int compared = 0;
  for (const auto& [name, t] : published) {
    if (t.dtype != "I8") continue;
    const int64_t n = t.shape[0];
    const int64_t k = t.shape[1];
    std::vector<int8_t> codes(static_cast<size_t>(n * k));
    std::vector<bf16> scales(static_cast<size_t>(n));
    w8a8_int8::quantise(widen(source.at(name)).data(), n, k, codes.data(), scales.data());
    EXPECT_EQ(codes, t.as<int8_t>()) << name;
    const auto stored = published.at(name + "_scale").as<bf16>();
    EXPECT_TRUE(std::equal(scales.begin(), scales.end(), stored.begin(), stored.end(),
                           [](bf16 a, bf16 b) { return a.bits == b.bits; }))
        << name;
    ++compared;
  }
  EXPECT_EQ(compared, 40);
}

}  // namespace
}  // namespace sortie::quant
