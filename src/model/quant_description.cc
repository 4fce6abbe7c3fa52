#include "model/quant_description.h"

#include <fmt/format.h>

#include <utility>

#include "base/json.h"
#include "model/safetensors_header.h"

namespace sortie::model {
namespace {

Status refuse(const std::string& where, std::string_view name, const nlohmann::json& value) {
  return Status::invalid(fmt::format(
      "{}: {} is {}; Sortie reads FLOAT, W8A8 and W8A8_DYNAMIC.", where, printable(name),
      printable(
          value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace).substr(0, 60))));
}

// Formats of the cache and of attention: they have no tensor of their own to be refused by.
Status check_global(const std::string& where, const std::string& name,
                    const nlohmann::json& value) {
  for (const char* key : {"kv_quant_type", "kv_cache_type", "fa_quant_type"}) {
    if (name != key || value.is_null() || value == "" || value == "FLOAT") continue;
    return refuse(where, name, value);
  }
  return Status::ok();
}

}  // namespace

Result<QuantDescription> parse_quant_description(std::string_view json, const std::string& where) {
  ASSIGN_OR_RETURN(const nlohmann::json j, parse_json(json, where));
  if (!j.is_object()) return Status::invalid(where + " is not a JSON object.");
  constexpr std::string_view kWeight = ".weight";
  QuantDescription schemes;
  for (const auto& [name, value] : j.items()) {
    RETURN_IF_ERROR(check_global(where, name, value));
    if (!name.ends_with(kWeight)) continue;
    SlimScheme scheme = SlimScheme::kFloat;
    if (value == "W8A8_DYNAMIC") {
      scheme = SlimScheme::kW8A8Dynamic;
    } else if (value == "W8A8") {
      scheme = SlimScheme::kW8A8Static;
    } else if (value != "FLOAT") {
      return refuse(where, name, value);
    }
    schemes.emplace(name.substr(0, name.size() - kWeight.size()), scheme);
  }
  if (schemes.empty()) {
    return Status::invalid(where + " names no weight: it should map tensor names to schemes.");
  }
  return schemes;
}

}  // namespace sortie::model
