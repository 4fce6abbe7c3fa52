#pragma once

#include <array>
#include <functional>
#include <string>
#include <vector>

#include "base/status.h"
#include "model/weights.h"
#include "quant/matrix_ops.h"

namespace sortie::model {

// The value of an input_scale for an expert's largest |activation|, as files hold it.
float input_scale(float amax);

struct QuantizeOptions {
  std::string in;   // a bf16 or fp8_block checkpoint folder
  std::string out;  // absent or empty
  Quantization format = Quantization::kNone;
  bool dense_fp8_block = false;  // w4afp8: the other linears as fp8_block
  // w4afp8, from a calibration: the largest |activation| that entered GEMM 1 and GEMM 2 of each
  // expert, [layer][expert]. An expert that saw no token (0) gets its layer's largest; a layer that
  // is not there gets no input_scale, hence dynamic activations.
  std::vector<std::vector<std::array<float, 2>>> expert_amax;
  quant::Rounding rounding = quant::Rounding::kNearest;  // kSearch: w4afp8
  std::string report;  // file for the distortion of each quantised matrix (JSON), or ""
  int threads = 1;
  bool quiet = false;          // no progress bar
  std::function<bool()> stop;  // asked before every tensor: true ends with kCancelled
};

// Writes the quantised checkpoint, by the same rule as loading with --quantization (quant_rules.h):
// the source's shards, tensor by tensor, config.json and what marks the format, and the folder's
// other files (tokenizer …). Everything is written to OUT.partial, read back and compared, and only
// then named OUT. Stopped, killed or out of disk with whole shards done, it keeps OUT.partial, and
// the same command goes on behind them; after any other error nothing is left. docs/formats.md
// lists names, types and shapes.
Status quantize_checkpoint(const QuantizeOptions& options);

}  // namespace sortie::model
