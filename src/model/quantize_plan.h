#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/tensor.h"
#include "model/config.h"
#include "model/quantize.h"
#include "model/safetensors.h"
#include "quant/matrix.h"

namespace sortie::model {

// One tensor of a shard to be written.
struct QuantizeOutput {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  int64_t bytes() const;
};

// What becomes of one tensor of the source.
struct QuantizePiece {
  enum class Kind : uint8_t {
    kCopy,      // the bytes as they are
    kQuantise,  // codes and scales of format `to`
    kToBf16,    // fp8 codes and scales as plain bf16
    kValue,     // no source: one fp32
  };
  Kind kind = Kind::kCopy;
  std::vector<QuantizeOutput> outputs;  // codes, then scales; otherwise one
  Tensor source;
  quant::Matrix matrix;  // the source as a matrix; scales are filled in when it is read
  Tensor source_scales;  // fp8_block: weight_scale_inv
  quant::Format to = quant::Format::kBf16;
  float value = 0;
};

struct QuantizeShard {
  std::string file_name;
  std::vector<QuantizePiece> pieces;  // in the order of the names
};

// The shards of the output, split as the source is: scales beside their codes, w1, w2 and w3 beside
// gate, down and up.
Result<std::vector<QuantizeShard>> plan_quantize(const Checkpoint& source,
                                                 const QuantizeOptions& options);

// config.json of the output: the source's text with another quantization_config, or none.
Result<std::string> quantised_config_json(std::string_view source, const Checkpoint& checkpoint,
                                          const Config& config, const QuantizeOptions& options);

// hf_quant_config.json, which marks a w4afp8 checkpoint; empty for other formats.
std::string quantised_hf_quant_config(Quantization format);

}  // namespace sortie::model
