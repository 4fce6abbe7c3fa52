#pragma once

#include <array>
#include <string>
#include <vector>

#include "base/status.h"
#include "model/model.h"

namespace sortie::cli {

struct RunOptions;

// Runs the checkpoint in bf16 over FILE.jsonl (`{"ids": […]}` or `{"text": …}` a line) and returns
// the largest |activation| that entered each expert's two GEMMs.
Result<model::Model::ExpertAmax> calibrate(const RunOptions& options);

// The static activation scales by (layer, GEMM) that `sortie quantize --calibrate` would write and
// a load would read back.
Result<std::vector<std::array<float, 2>>> calibrated_scales(const RunOptions& options);

}  // namespace sortie::cli
