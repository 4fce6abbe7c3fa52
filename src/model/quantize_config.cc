#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "model/quantize_plan.h"

namespace sortie::model {
namespace {

using Json = nlohmann::ordered_json;

// The layer of "model.layers.L.…", or -1.
int64_t layer_of(std::string_view module) {
  constexpr std::string_view kLayers = "model.layers.";
  int64_t layer = -1;
  if (module.starts_with(kLayers)) {
    std::from_chars(module.data() + kLayers.size(), module.data() + module.size(), layer);
  }
  return layer;
}

// The linear modules that w8a8_int8 leaves alone: lm_head, then by layer.
std::vector<std::string> int8_ignore(const Checkpoint& checkpoint) {
  constexpr std::array<std::string_view, 4> kLeft = {".mlp.gate", ".kv_b_proj", ".eh_proj",
                                                     ".shared_head.head"};
  std::vector<std::string> modules = {"lm_head"};
  for (const auto& [name, entry] : checkpoint.tensors()) {
    std::string_view module = name;
    if (!module.ends_with(".weight")) continue;
    module.remove_suffix(std::string_view(".weight").size());
    if (std::any_of(kLeft.begin(), kLeft.end(),
                    [&](auto left) { return module.ends_with(left); })) {
      modules.emplace_back(module);
    }
  }
  // The checkpoint's order is that of the names, in which layer 10 comes before layer 2.
  std::stable_sort(modules.begin(), modules.end(),
                   [](const auto& a, const auto& b) { return layer_of(a) < layer_of(b); });
  return modules;
}

Json compressed_tensors(const Checkpoint& checkpoint) {
  const auto side = [](const char* strategy, bool dynamic) {
    return Json{{"num_bits", 8},
                {"type", "int"},
                {"strategy", strategy},
                {"symmetric", true},
                {"dynamic", dynamic}};
  };
  return {{"quant_method", "compressed-tensors"},
          {"format", "int-quantized"},
          {"quantization_status", "compressed"},
          {"ignore", int8_ignore(checkpoint)},
          {"kv_cache_scheme", nullptr},
          {"config_groups",
           {{"group_0",
             {{"targets", Json::array({"Linear"})},
              {"weights", side("channel", false)},
              {"input_activations", side("token", true)},
              {"output_activations", nullptr}}}}}};
}

}  // namespace

std::string quantised_hf_quant_config(Quantization format) {
  if (format != Quantization::kW4Afp8) return {};
  return Json{
      {"quantization", {{"quant_algo", "MIXED_PRECISION"}, {"kv_cache_quant_algo", nullptr}}}}
      .dump(2);
}

Result<std::string> quantised_config_json(std::string_view source, const Checkpoint& checkpoint,
                                          const Config& config, const QuantizeOptions& options) {
  if (json_too_deep(source)) return Status::invalid("config.json nests too deep.");
  Json json = Json::parse(source, nullptr, false);
  if (!json.is_object()) return Status::invalid("config.json is not a JSON object.");
  json.erase("quantization_config");
  switch (options.format) {
    case Quantization::kFp8Block:
      json["quantization_config"] = {{"activation_scheme", "dynamic"},
                                     {"fmt", "e4m3"},
                                     {"quant_method", "fp8"},
                                     {"weight_block_size", Json::array({128, 128})}};
      break;
    case Quantization::kW8A8Int8:
      json["quantization_config"] = compressed_tensors(checkpoint);
      break;
    case Quantization::kW4Afp8:
      // hf_quant_config.json marks the format. It has no word for power-of-two activation scales,
      // which a source may have asked for; the later form of the mark has.
      if (config.ue8m0_scales) {
        json["quantization_config"] = {
            {"quant_method", "w4afp8"}, {"group_size", 128}, {"scale_fmt", "ue8m0"}};
      }
      break;
    case Quantization::kNone:
      break;
  }
  return json.dump(2, ' ', false, Json::error_handler_t::replace);
}

}  // namespace sortie::model
