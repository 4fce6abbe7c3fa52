#include "model/config_quantization.h"

#include <fmt/format.h>

#include <memory>
#include <string>
#include <utility>

#include "base/json.h"
#include "model/config_reader.h"

namespace sortie::model {
namespace {

constexpr const char* kReadable =
    "Sortie reads bf16, fp8 with 128x128 blocks, w4afp8, and int8 (compressed-tensors, w8a8_int8 "
    "or msModelSlim's W8A8)";

Status refuse(const std::string& what) {
  return Status::invalid(fmt::format("Quantization {} is not supported; {}.", what, kReadable));
}

// DeepSeek-V3's own form: {"quant_method": "fp8", "weight_block_size": [128, 128], …}.
Status check_fp8_block(const nlohmann::json& q, Config& config) {
  const auto block = q.find("weight_block_size");
  if (block == q.end() || *block != nlohmann::json::array({128, 128})) {
    return refuse(fmt::format("fp8 with \"weight_block_size\" = {}",
                              block == q.end() ? "none" : block->dump().substr(0, 60)));
  }
  ConfigReader reader(q, "config.json: quantization_config");
  const std::string fmt_name = reader.string("fmt", "e4m3");
  const std::string activations = reader.string("activation_scheme", "dynamic");
  const std::string scale_fmt = reader.string("scale_fmt", "");
  RETURN_IF_ERROR(reader.status());
  if (fmt_name != "e4m3") return refuse("fp8 of \"fmt\" " + fmt_name);
  if (activations != "dynamic") return refuse("fp8 of \"activation_scheme\" " + activations);
  if (!scale_fmt.empty() && scale_fmt != "ue8m0" && scale_fmt != "float") {
    return refuse("fp8 of \"scale_fmt\" " + scale_fmt);
  }
  config.dialect = Dialect::kFp8Block;
  config.ue8m0_scales = scale_fmt == "ue8m0";
  return Status::ok();
}

Status check_w4afp8(const nlohmann::json& q, Config& config) {
  ConfigReader reader(q, "config.json: quantization_config");
  const int64_t group = reader.integer("group_size", 128, 1, 1 << 20);
  const std::string scale_fmt = reader.string("scale_fmt", "");
  RETURN_IF_ERROR(reader.status());
  if (group != 128) return refuse(fmt::format("w4afp8 with \"group_size\" {}", group));
  config.dialect = Dialect::kW4Afp8;
  config.ue8m0_scales = scale_fmt == "ue8m0";
  return Status::ok();
}

// One side ("weights" or "input_activations") of a compressed-tensors group.
bool is_int8(const nlohmann::json& group, const char* side, const char* strategy, bool dynamic) {
  const auto it = group.find(side);
  if (it == group.end() || !it->is_object()) return false;
  const auto has = [&](const char* key, const nlohmann::json& wanted) {
    const auto v = it->find(key);
    return v != it->end() && *v == wanted;
  };
  return has("num_bits", 8) && has("type", "int") && has("strategy", strategy) &&
         has("symmetric", true) && has("dynamic", dynamic);
}

std::string describe(const nlohmann::json& group, const char* side) {
  const auto it = group.find(side);
  if (it == group.end() || !it->is_object()) return fmt::format("no {}", side);
  const auto text = [&](const char* key) {
    const auto v = it->find(key);
    return v == it->end() ? std::string("?") : v->dump().substr(0, 40);
  };
  return fmt::format("{} of type {}, num_bits {}, strategy {}, symmetric {}, dynamic {}", side,
                     text("type"), text("num_bits"), text("strategy"), text("symmetric"),
                     text("dynamic"));
}

Status check_compressed_tensors(const nlohmann::json& q, Config& config) {
  const auto groups = q.find("config_groups");
  if (groups == q.end() || !groups->is_object() || groups->empty()) {
    return refuse("compressed-tensors without \"config_groups\"");
  }
  bool per_token = false;
  for (const auto& [name, group] : groups->items()) {
    if (!group.is_object()) return refuse("compressed-tensors with a malformed group " + name);
    const bool weights =
        is_int8(group, "weights", "channel", false) || is_int8(group, "weights", "tensor", false);
    const bool dynamic = is_int8(group, "input_activations", "token", true);
    const bool fixed = is_int8(group, "input_activations", "tensor", false);
    if (!weights || (!dynamic && !fixed)) {
      return refuse(fmt::format("compressed-tensors with {} and {}", describe(group, "weights"),
                                describe(group, "input_activations")));
    }
    per_token = per_token || dynamic;
    config.int8_static_activations = config.int8_static_activations || fixed;
  }
  if (per_token && config.int8_static_activations) {
    return refuse("compressed-tensors with groups of per-token and of static activations");
  }
  if (const auto kv = q.find("kv_cache_scheme"); kv != q.end() && !kv->is_null()) {
    return refuse("compressed-tensors with a \"kv_cache_scheme\"");
  }
  if (const auto ignore = q.find("ignore"); ignore != q.end() && !ignore->is_null()) {
    if (!ignore->is_array()) return refuse("compressed-tensors whose \"ignore\" is not a list");
    for (const auto& module : *ignore) {
      if (!module.is_string()) {
        return refuse("compressed-tensors whose \"ignore\" holds other than strings");
      }
      config.quant_ignore.push_back(module.get<std::string>());
    }
  }
  config.dialect = Dialect::kCompressedTensorsInt8;
  return Status::ok();
}

// {"quantization": {"quant_algo": "MIXED_PRECISION", …}} is how TensorRT-LLM's script marks w4afp8.
Status check_hf_quant_config(std::string_view text, Config& config) {
  ASSIGN_OR_RETURN(const nlohmann::json j, parse_json(text, "hf_quant_config.json"));
  if (!j.is_object()) return Status::invalid("hf_quant_config.json is not a JSON object.");
  const auto q = j.find("quantization");
  if (q == j.end() || !q->is_object()) {
    return Status::invalid("hf_quant_config.json lacks \"quantization\".");
  }
  ConfigReader reader(*q, "hf_quant_config.json");
  const std::string algo = reader.string("quant_algo", "");
  RETURN_IF_ERROR(reader.status());
  if (algo.empty()) return Status::ok();
  // Some published folders also kept the source's fp8 quantization_config: w4afp8 contains it.
  if (algo == "MIXED_PRECISION" &&
      (config.dialect == Dialect::kBf16 || config.dialect == Dialect::kFp8Block)) {
    config.dialect = Dialect::kW4Afp8;
    return Status::ok();
  }
  if (algo == "MIXED_PRECISION" && config.dialect == Dialect::kW4Afp8) return Status::ok();
  return refuse(fmt::format("\"{}\" (quant_algo in hf_quant_config.json)", algo.substr(0, 60)));
}

}  // namespace

Status detect_dialect(const nlohmann::json& config_json, std::string_view hf_quant_config_json,
                      std::string_view quant_description_json, Config& config) {
  config.dialect = Dialect::kBf16;
  const auto q = config_json.find("quantization_config");
  if (q != config_json.end() && !q->is_null()) {
    if (!q->is_object()) {
      return Status::invalid("config.json: \"quantization_config\" is not an object.");
    }
    ConfigReader reader(*q, "config.json: quantization_config");
    const std::string method = reader.string("quant_method", "");
    RETURN_IF_ERROR(reader.status());
    if (method == "fp8") {
      RETURN_IF_ERROR(check_fp8_block(*q, config));
    } else if (method == "w4afp8") {
      RETURN_IF_ERROR(check_w4afp8(*q, config));
    } else if (method == "compressed-tensors") {
      RETURN_IF_ERROR(check_compressed_tensors(*q, config));
    } else if (method == "w8a8_int8") {
      config.dialect = Dialect::kCompressedTensorsInt8;
    } else {
      return refuse(fmt::format("\"{}\" (quant_method in config.json)", method.substr(0, 60)));
    }
  }
  if (!hf_quant_config_json.empty()) {
    RETURN_IF_ERROR(check_hf_quant_config(hf_quant_config_json, config));
  }
  if (quant_description_json.empty()) return Status::ok();
  // msModelSlim leaves config.json alone, so an fp8 section is the source's.
  if (config.dialect != Dialect::kBf16 && config.dialect != Dialect::kFp8Block) {
    return Status::invalid(
        "Both config.json (or hf_quant_config.json) and quant_model_description.json say how the "
        "weights are quantised; remove the one that does not belong to them.");
  }
  ASSIGN_OR_RETURN(QuantDescription description,
                   parse_quant_description(quant_description_json, "quant_model_description.json"));
  config.quant_description = std::make_shared<const QuantDescription>(std::move(description));
  config.dialect = Dialect::kModelSlim;
  config.ue8m0_scales = false;
  return Status::ok();
}

}  // namespace sortie::model
