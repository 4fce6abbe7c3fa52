#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "model/weights.h"

namespace sortie::model {

// Random weights of a model's shape, for measuring: sizes, formats and magnitudes are those of a
// real checkpoint, the answers mean nothing. The same seed gives the same weights in memory and on
// disk. kW4Afp8 has fp8_block for the linears that are not routed experts, and dynamic activations.

// One rank's weights in memory, packed for a backend as LoadOptions::pack_for says.
Result<std::shared_ptr<const Weights>> random_weights(const Config& config, Dialect dialect,
                                                      int rank, int ranks, uint64_t seed,
                                                      const ops::Backend* pack_for = nullptr);

// config.json, model.safetensors and what else marks the dialect, into an existing folder.
Status write_random_checkpoint(const std::string& folder, const Config& config, Dialect dialect,
                               uint64_t seed);

// config.json for `config` (and its quantization_config), as load_config reads it back.
std::string config_json(const Config& config, Dialect dialect);

}  // namespace sortie::model
