#pragma once

#include <string>

#include "base/status.h"
#include "ops/ops.h"

// One Hopper GPU (sm_90a): activations bf16, all pointers in the device's memory (docs/cuda.md).
namespace sortie::cuda {

// ok, or the sentence that says why there is no usable GPU here.
Status available();

// "NVIDIA H200, 132 SMs, 139.8 GiB"; empty without one.
std::string describe_device();

const ops::BackendOf<bf16>& backend();

}  // namespace sortie::cuda
