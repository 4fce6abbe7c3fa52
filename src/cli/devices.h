#pragma once

#include <string>
#include <string_view>

#include "base/status.h"
#include "ops/ops.h"

namespace sortie::cli {

// What --device names: one of the two is set.
struct Device {
  std::string_view name;  // of the backend
  const ops::Backend* host = nullptr;
  const ops::BackendOf<bf16>* gpu = nullptr;
};

// cpu, reference, and cuda where this build has it and a GPU is there.
Result<Device> choose_device(const std::string& name);

}  // namespace sortie::cli
