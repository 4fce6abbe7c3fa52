#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

#include "base/status.h"
#include "model/config.h"

namespace sortie::model {

// Sets dialect and what belongs to it (ue8m0_scales, quant_ignore, int8_static_activations,
// quant_description) from config.json's quantization_config, hf_quant_config.json and msModelSlim's
// quant_model_description.json (empty text = not there), or refuses by name.
Status detect_dialect(const nlohmann::json& config_json, std::string_view hf_quant_config_json,
                      std::string_view quant_description_json, Config& config);

}  // namespace sortie::model
