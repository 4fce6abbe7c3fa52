#pragma once

#include <string>

#include "base/status.h"

namespace sortie::cli {

struct QuantizeCommand {
  std::string in;
  std::string out;
  std::string format;                // w4afp8 | w8a8_int8 | fp8_block (fp8)
  std::string dense;                 // w4afp8: empty or fp8_block
  std::string calibrate;             // w4afp8: JSON lines for static activation scales
  std::string rounding = "nearest";  // w4afp8: nearest | search
  std::string report;                // file for the distortion of each matrix
  int threads = 0;
  bool quiet = false;
};

// sortie quantize IN OUT --format …: writes the quantised checkpoint (model/quantize.h).
Status quantize_command(const QuantizeCommand& command);

}  // namespace sortie::cli
