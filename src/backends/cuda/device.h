#pragma once

#include "ops/ops.h"

namespace sortie::cuda {

const ops::Device& device();

// Keeps the first launch error of this thread, with the kernel's name, for Device::finish.
void note_launch(const char* kernel);

}  // namespace sortie::cuda
