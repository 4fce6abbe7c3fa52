#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "base/status.h"

namespace sortie::model {

// How msModelSlim stored a linear.
enum class SlimScheme : uint8_t {
  kFloat,        // "FLOAT": as in the source
  kW8A8Dynamic,  // "W8A8_DYNAMIC": int8 weights, int8 activations with one scale a token
  kW8A8Static,   // "W8A8": int8 weights, int8 activations with one scale and offset a tensor
};

// Module name ("model.layers.0.self_attn.o_proj") to its scheme. Entries of other tensors follow
// from their module's, and are not kept.
using QuantDescription = std::map<std::string, SlimScheme, std::less<>>;

// Reads msModelSlim's quant_model_description*.json: a flat object of tensor names to schemes, with
// global keys among them. Refuses by name a scheme, a cache format or a value that Sortie cannot
// run. `where` names the text in errors.
Result<QuantDescription> parse_quant_description(std::string_view json, const std::string& where);

}  // namespace sortie::model
