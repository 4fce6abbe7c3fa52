#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "cli/ranks.h"

namespace sortie::cli {

struct GoldensOptions {
  RunOptions run;
  std::string file;  // golden.safetensors or golden.json
  std::optional<double>
      tolerance;  // relative; default: 1e-4, or the rule for quantised checkpoints
};

// sortie eval goldens MODEL FILE: logits and tokens against a reference's, each sequence on a line.
// Fails past the tolerance. Quantised checkpoints: at least three quarters of the sequences within
// 1e-5 and every one within 5e-2 (a code on the other side of a rounding tie moves a whole
// sequence).
Status eval_goldens(GoldensOptions options, const Launch& launch);

}  // namespace sortie::cli
