#pragma once

// For tests: one small random model, written plainly in every dialect that is read. The source is
// bf16 and has an MTP layer; each dialect's file follows from it by the dialect's own rules.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "model/random_checkpoint.h"
#include "model/safetensors.h"
#include "quant/matrix_ops.h"

namespace sortie::model {

struct DialectTensor {
  std::string name;
  DType dtype;
  std::vector<int64_t> shape;
  std::string bytes;

  template <typename T>
  T at(int64_t i) const {
    T v;
    std::memcpy(&v, bytes.data() + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    return v;
  }
  template <typename T>
  void add(T v) {
    bytes.append(reinterpret_cast<const char*>(&v), sizeof(T));
  }
};
using DialectTensors = std::vector<DialectTensor>;

enum class TestDialect : uint8_t {
  kBf16,
  kFp8Block,           // the official form
  kFp8BlockE8m0,       // scales of type F8_E8M0
  kFp8BlockUe8m0,      // the same scales as F32
  kW4Afp8,             // F32 scales, input_scale [1], MTP layer fp8_block
  kW4Afp8Bf16Scales,   // scales bf16, input_scale a scalar, MTP layer bf16
  kSlimDynamic,        // msModelSlim under its older file names
  kSlimStatic,         // attention static, norm biases, MTP layer FLOAT
  kSlimStaticPacked,   // … of an fp16 model: deq_scale in int64
  kCompressedChannel,  // dynamic, `ignore` keeps the MTP layer
  kCompressedTensor,   // strategy "tensor" on both sides
};
constexpr TestDialect kTestDialects[] = {TestDialect::kBf16,
                                         TestDialect::kFp8Block,
                                         TestDialect::kFp8BlockE8m0,
                                         TestDialect::kFp8BlockUe8m0,
                                         TestDialect::kW4Afp8,
                                         TestDialect::kW4Afp8Bf16Scales,
                                         TestDialect::kSlimDynamic,
                                         TestDialect::kSlimStatic,
                                         TestDialect::kSlimStaticPacked,
                                         TestDialect::kCompressedChannel,
                                         TestDialect::kCompressedTensor};
inline std::string test_dialect_name(TestDialect d) {
  constexpr const char* kNames[] = {"bf16",
                                    "fp8_block",
                                    "fp8_block_e8m0",
                                    "fp8_block_ue8m0",
                                    "w4afp8",
                                    "w4afp8_bf16_scales",
                                    "slim_dynamic",
                                    "slim_static",
                                    "slim_static_packed",
                                    "ct_channel",
                                    "ct_tensor"};
  return kNames[static_cast<size_t>(d)];
}

inline DialectTensors read_tensors(const std::string& folder) {
  const auto checkpoint = Checkpoint::open(folder);
  EXPECT_TRUE(checkpoint.is_ok()) << checkpoint.status().message();
  DialectTensors all;
  if (!checkpoint.is_ok()) return all;
  for (const auto& [name, entry] : (*checkpoint)->tensors()) {
    const Tensor& t = entry.tensor;
    all.push_back(
        {name,
         t.dtype,
         {t.shape.begin(), t.shape.begin() + t.rank},
         std::string(reinterpret_cast<const char*>(t.data), static_cast<size_t>(t.bytes()))});
  }
  return all;
}

inline void write_tensors(const std::string& path, const DialectTensors& tensors) {
  SafetensorsWriter writer;
  for (const DialectTensor& t : tensors) writer.declare(t.name, t.dtype, t.shape);
  ASSERT_TRUE(writer.open(path).is_ok());
  for (const DialectTensor& t : tensors) {
    ASSERT_TRUE(writer.write(t.bytes.data(), static_cast<int64_t>(t.bytes.size())).is_ok());
  }
  ASSERT_TRUE(writer.finish().is_ok());
}

inline const DialectTensor& tensor_named(const DialectTensors& tensors, const std::string& name) {
  for (const DialectTensor& t : tensors) {
    if (t.name == name) return t;
  }
  ADD_FAILURE() << "no tensor " << name;
  return tensors.front();
}

class DialectWriter {
 public:
  DialectWriter(TestDialect dialect, std::string folder)
      : dialect_(dialect), folder_(std::move(folder)) {}

  void write() {
    Config config =
        load_config(std::string(SORTIE_SOURCE_DIR) + "/tests/data/formats/bf16").value();
    config.num_nextn_predict_layers = 1;
    ASSERT_TRUE(write_random_checkpoint(folder_, config, Dialect::kBf16, 11).is_ok());
    const DialectTensors source = read_tensors(folder_);
    std::remove((folder_ + "/model.safetensors").c_str());
    for (const DialectTensor& t : source) {
      if (is_linear(t)) {
        linear(t);
      } else {
        plain(t);
      }
    }
    add_norm_biases(source);
    add_input_scales(config);
    nlohmann::json j = nlohmann::json::parse(config_json(config, Dialect::kBf16));
    if (nlohmann::json q = quantization_config(); !q.is_null()) j["quantization_config"] = q;
    text("config.json", j);
    const bool older = dialect_ == TestDialect::kSlimDynamic;
    if (is_slim()) {
      description_["model_quant_type"] = "W8A8";
      description_["version"] = "1.0.0";
      description_["group_size"] = 0;
      text(older ? "quant_model_description_w8a8_dynamic.json" : "quant_model_description.json",
           description_);
    }
    write_tensors(folder_ + (older       ? "/quant_model_weight_w8a8_dynamic.safetensors"
                             : is_slim() ? "/quant_model_weights.safetensors"
                                         : "/model.safetensors"),
                  out_);
  }

 private:
  using Format = quant::Format;

  bool is(TestDialect d) const { return dialect_ == d; }
  bool is_slim() const {
    return is(TestDialect::kSlimDynamic) || is(TestDialect::kSlimStatic) ||
           is(TestDialect::kSlimStaticPacked);
  }
  static bool has(const std::string& name, const char* part) {
    return name.find(part) != std::string::npos;
  }
  static bool is_mtp(const std::string& name) { return has(name, "layers.2."); }
  static bool is_linear(const DialectTensor& t) {
    return t.shape.size() == 2 && !has(t.name, "embed") && !has(t.name, "head") &&
           !has(t.name, "mlp.gate.") && !has(t.name, "eh_proj");
  }

  void text(const std::string& name, const nlohmann::json& j) const {
    std::ofstream(folder_ + "/" + name) << j.dump(1);
  }
  DialectTensor& add(const std::string& name, DType dtype, std::vector<int64_t> shape) {
    return out_.emplace_back(DialectTensor{name, dtype, std::move(shape), {}});
  }
  void note(const std::string& name, const char* scheme) { description_[name] = scheme; }

  // As in the source, or fp16 in an fp16 model (all values here have few bits).
  void plain(const DialectTensor& t) {
    note(t.name, "FLOAT");
    if (!is(TestDialect::kSlimStaticPacked) || t.dtype != DType::kBf16) {
      out_.push_back(t);
      return;
    }
    DialectTensor& half = add(t.name, DType::kF16, t.shape);
    for (size_t i = 0; i < t.bytes.size() / 2; ++i) {
      const uint32_t bits = std::bit_cast<uint32_t>(to_float(t.at<bf16>(static_cast<int64_t>(i))));
      const uint32_t exponent = (bits >> 23) & 255u;
      const uint32_t magnitude =
          exponent == 0 ? 0 : ((exponent - 112u) << 10) | ((bits >> 13) & 0x3ffu);
      half.add(static_cast<uint16_t>((bits >> 16 & 0x8000u) | magnitude));
    }
  }

  void linear(const DialectTensor& t) {
    const bool kv_b = has(t.name, "kv_b_proj");
    switch (dialect_) {
      case TestDialect::kBf16:
        return plain(t);
      case TestDialect::kFp8Block:
        return fp8(t, DType::kF32, false);
      case TestDialect::kFp8BlockE8m0:
        return fp8(t, DType::kE8m0, true);
      case TestDialect::kFp8BlockUe8m0:
        return fp8(t, DType::kF32, true);
      case TestDialect::kW4Afp8:
        return has(t.name, ".experts.") && !is_mtp(t.name) ? int4(t, DType::kF32)
                                                           : fp8(t, DType::kF32, false);
      case TestDialect::kW4Afp8Bf16Scales:
        if (is_mtp(t.name)) return plain(t);
        return has(t.name, ".experts.") ? int4(t, DType::kBf16) : fp8(t, DType::kF32, false);
      case TestDialect::kSlimDynamic:
        return int8(t, "W8A8_DYNAMIC");
      case TestDialect::kSlimStatic:
      case TestDialect::kSlimStaticPacked:
        if (kv_b || is_mtp(t.name)) return plain(t);
        return int8(t,
                    has(t.name, ".experts.") || has(t.name, "down_proj") ? "W8A8_DYNAMIC" : "W8A8");
      case TestDialect::kCompressedChannel:
        return is_mtp(t.name) ? plain(t) : int8(t, "");
      case TestDialect::kCompressedTensor:
        return int8_tensor(t);
    }
  }

  static quant::Matrix matrix_of(const DialectTensor& t) {
    return {.format = Format::kBf16,
            .n = t.shape[0],
            .k = t.shape[1],
            .codes = reinterpret_cast<const std::byte*>(t.bytes.data())};
  }
  static float value(const DialectTensor& t, int64_t i) { return to_float(t.at<bf16>(i)); }
  static std::string module_of(const DialectTensor& t) {
    return t.name.substr(0, t.name.size() - std::strlen(".weight"));
  }

  void fp8(const DialectTensor& t, DType scale_type, bool powers_of_two) {
    const int64_t n = t.shape[0];
    const int64_t k = t.shape[1];
    const int64_t rows = quant::ceil_div(n, 128);
    const int64_t columns = quant::ceil_div(k, 128);
    DialectTensor scales{t.name + "_scale_inv", scale_type, {rows, columns}, {}};
    DialectTensor codes{t.name, DType::kE4m3, t.shape, std::string(t.bytes.size() / 2, '\0')};
    for (int64_t b = 0; b < rows * columns; ++b) {
      const int64_t first_row = b / columns * 128;
      const int64_t first = b % columns * 128;
      const auto each = [&](auto fn) {
        for (int64_t r = first_row; r < std::min(n, first_row + 128); ++r) {
          for (int64_t c = first; c < std::min(k, first + 128); ++c) fn(r * k + c);
        }
      };
      float amax = 0;
      each([&](int64_t i) { amax = std::max(amax, std::fabs(value(t, i))); });
      const float exact = amax / 448.0f;
      const int exponent = static_cast<int>(std::ceil(std::log2(exact)));
      const float scale = powers_of_two ? std::ldexp(1.0f, exponent) : exact;
      if (scale_type == DType::kE8m0) {
        scales.add(static_cast<uint8_t>(exponent + 127));
      } else {
        scales.add(scale);
      }
      each([&](int64_t i) {
        codes.bytes[static_cast<size_t>(i)] = static_cast<char>(to_e4m3(value(t, i) / scale).bits);
      });
    }
    out_.push_back(std::move(codes));
    out_.push_back(std::move(scales));
  }

  void int4(const DialectTensor& t, DType scale_type) {
    const quant::Matrix m = matrix_of(t);
    DialectTensor codes{t.name, DType::kI8, {m.n, m.k / 2}, std::string(t.bytes.size() / 4, '\0')};
    std::vector<bf16> scales(static_cast<size_t>(m.n * m.k_groups()));
    quant::quantise_rows(m, 0, m.n, Format::kW4Afp8,
                         reinterpret_cast<std::byte*>(codes.bytes.data()), scales.data());
    out_.push_back(std::move(codes));
    DialectTensor& s = add(t.name + "_scale_inv", scale_type, {m.n, m.k_groups()});
    for (const bf16 v : scales) {
      if (scale_type == DType::kBf16) {
        s.add(v);
      } else {
        s.add(to_float(v));
      }
    }
  }

  // Dynamic compressed-tensors (empty scheme) and both kinds of msModelSlim.
  void int8(const DialectTensor& t, const std::string& scheme) {
    const quant::Matrix m = matrix_of(t);
    DialectTensor codes{t.name, DType::kI8, t.shape, std::string(t.bytes.size() / 2, '\0')};
    std::vector<float> scales(static_cast<size_t>(m.n));
    quant::quantise_rows(m, 0, m.n, Format::kW8A8Int8,
                         reinterpret_cast<std::byte*>(codes.bytes.data()), scales.data());
    if (scheme == "W8A8") {
      static_int8(module_of(t), codes, scales);
    } else {
      DialectTensor& s = add(t.name + "_scale", DType::kF32, {m.n, 1});
      for (const float v : scales) s.add(v);
      if (!scheme.empty()) {
        add(t.name + "_offset", DType::kF32, {m.n, 1}).bytes.assign(scales.size() * 4, '\0');
        note(t.name + "_scale", scheme.c_str());
        note(t.name + "_offset", scheme.c_str());
      }
    }
    note(t.name, scheme.c_str());
    out_.push_back(std::move(codes));
  }

  void static_int8(const std::string& module, const DialectTensor& codes,
                   const std::vector<float>& scales) {
    // Two linears that share an input may have scales and offsets of their own.
    const bool first = has(module, "q_a_proj") || has(module, "gate_proj");
    const bf16 input_scale = to_bf16(first ? 0.04f : 0.05f);
    const float offset = first ? 7.0f : -9.0f;
    const auto n = static_cast<int64_t>(scales.size());
    const int64_t k = codes.shape[1];
    const bool packed = is(TestDialect::kSlimStaticPacked);
    add(module + ".input_scale", DType::kBf16, {1}).add(input_scale);
    add(module + ".input_offset", DType::kBf16, {1}).add(to_bf16(offset));
    DialectTensor bias{module + ".quant_bias", DType::kI32, {n}, {}};
    DialectTensor deq{module + ".deq_scale", packed ? DType::kI64 : DType::kF32, {n}, {}};
    for (int64_t r = 0; r < n; ++r) {
      int32_t sum = 0;
      for (int64_t c = 0; c < k; ++c) sum += codes.at<int8_t>(r * k + c);
      bias.add(-sum * static_cast<int32_t>(offset));
      const float scale = to_float(input_scale) * scales[static_cast<size_t>(r)];
      if (packed) {
        deq.add(int64_t{std::bit_cast<uint32_t>(scale)});
      } else {
        deq.add(scale);
      }
    }
    for (const char* name : {".input_scale", ".input_offset", ".quant_bias", ".deq_scale"}) {
      note(module + name, "W8A8");
    }
    out_.push_back(std::move(bias));
    out_.push_back(std::move(deq));
  }

  void int8_tensor(const DialectTensor& t) {
    const auto n = static_cast<int64_t>(t.bytes.size() / 2);
    float amax = 0;
    for (int64_t i = 0; i < n; ++i) amax = std::max(amax, std::fabs(value(t, i)));
    const float scale = amax / 127.0f;
    add(t.name + "_scale", DType::kF32, {1}).add(scale);
    // Experts of a layer have scales of their own; the largest holds for all.
    add(module_of(t) + ".input_scale", DType::kF32, {1})
        .add(has(t.name, "experts.3.") ? 0.0625f : 0.04f);
    DialectTensor& codes = add(t.name, DType::kI8, t.shape);
    for (int64_t i = 0; i < n; ++i) {
      codes.add(static_cast<int8_t>(std::nearbyint(value(t, i) / scale)));
    }
  }

  void add_norm_biases(const DialectTensors& source) {
    if (!is(TestDialect::kSlimStatic)) return;
    for (const DialectTensor& t : source) {
      if (!has(t.name, "norm.weight")) continue;
      DialectTensor& bias = add(module_of(t) + ".bias", DType::kBf16, t.shape);
      for (int64_t i = 0; i < t.shape[0]; ++i) {
        bias.add(to_bf16(static_cast<float>(i * 37 % 64 - 32) / 256));
      }
      note(bias.name, "FLOAT");
    }
  }

  void add_input_scales(const Config& config) {
    const bool scalar = is(TestDialect::kW4Afp8Bf16Scales);
    if (!scalar && !is(TestDialect::kW4Afp8)) return;
    for (int e = 0; e < config.n_routed_experts; ++e) {
      for (const char* part : {"w1", "w2", "w3"}) {
        add("model.layers.1.mlp.experts." + std::to_string(e) + "." + part + ".input_scale",
            DType::kF32, scalar ? std::vector<int64_t>{} : std::vector<int64_t>{1})
            .add(0.01f + 0.001f * static_cast<float>(e));
      }
    }
  }

  nlohmann::json quantization_config() const {
    using nlohmann::json;
    const auto side = [](const char* strategy, bool dynamic) {
      return json{{"num_bits", 8},
                  {"type", "int"},
                  {"symmetric", true},
                  {"strategy", strategy},
                  {"dynamic", dynamic}};
    };
    switch (dialect_) {
      case TestDialect::kFp8Block:
      case TestDialect::kFp8BlockE8m0:
      case TestDialect::kFp8BlockUe8m0: {
        json q = {{"quant_method", "fp8"},
                  {"fmt", "e4m3"},
                  {"activation_scheme", "dynamic"},
                  {"weight_block_size", {128, 128}}};
        if (!is(TestDialect::kFp8Block)) q["scale_fmt"] = "ue8m0";
        return q;
      }
      case TestDialect::kW4Afp8:
      case TestDialect::kW4Afp8Bf16Scales:
        return {{"quant_method", "w4afp8"}};
      case TestDialect::kCompressedChannel:
      case TestDialect::kCompressedTensor: {
        const bool tensor = is(TestDialect::kCompressedTensor);
        json ignore = {"lm_head", "re:.*mlp.gate$"};
        if (!tensor) ignore.push_back("model.layers.2.self_attn.o_proj");
        return {{"quant_method", "compressed-tensors"},
                {"format", "int-quantized"},
                {"ignore", ignore},
                {"config_groups",
                 {{"group_0",
                   {{"targets", {"Linear"}},
                    {"weights", side(tensor ? "tensor" : "channel", false)},
                    {"input_activations", side(tensor ? "tensor" : "token", !tensor)}}}}}};
      }
      default:
        return nullptr;
    }
  }

  const TestDialect dialect_;
  const std::string folder_;
  DialectTensors out_;
  nlohmann::json description_ = nlohmann::json::object();
};

// Into an existing folder.
inline void write_test_dialect(TestDialect dialect, const std::string& folder) {
  DialectWriter(dialect, folder).write();
}

}  // namespace sortie::model
