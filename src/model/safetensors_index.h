#pragma once

#include <map>
#include <string>
#include <string_view>

#include "base/status.h"

namespace sortie::model {

// Tensor name to the name of the shard that holds it.
using SafetensorsIndex = std::map<std::string, std::string>;

// Reads a *.safetensors.index.json, as Hugging Face writes it beside the shards: {"metadata": {…},
// "weight_map": {tensor: shard}}. Every shard is a plain *.safetensors name, fit for a path and for
// a terminal; another one is refused. `where` names the text in errors.
Result<SafetensorsIndex> parse_safetensors_index(std::string_view json, const std::string& where);

}  // namespace sortie::model
