#pragma once

#include <memory>

#include "base/status.h"
#include "model/weights.h"
#include "ops/ops.h"

namespace sortie::model {

// The weights of one rank in a device's memory, arranged as its kernels want them (docs/cuda.md).
// The host's copy is not needed afterwards. An error names what did not fit.
Result<std::shared_ptr<const Weights>> upload(const Weights& host, const Config& config,
                                              const ops::Device& device, void* stream);

}  // namespace sortie::model
