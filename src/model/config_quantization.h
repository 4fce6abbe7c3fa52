#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

#include "base/status.h"
#include "model/config.h"

namespace sortie::model {

// Sets dialect, ue8m0_scales and quant_ignore from config.json's quantization_config and
// hf_quant_config.json (empty text = not there), or refuses by name.
Status detect_dialect(const nlohmann::json& config_json, std::string_view hf_quant_config_json,
                      Config& config);

}  // namespace sortie::model
