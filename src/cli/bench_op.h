#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "quant/matrix.h"

namespace sortie::cli {

struct BenchOpOptions {
  std::vector<std::string> formats = {"bf16", "fp8_block", "w8a8_int8", "w4afp8"};
  std::vector<int64_t> hidden = {7168, 2048};  // with expert widths 2048 and 1408
  std::vector<int64_t> rows = {1, 16};         // rows an expert
  int experts = 8;                             // that have rows
  int threads = 0;                             // 0 = all usable CPUs
  std::string device = "cpu";                  // or cuda
  double seconds = 1;                          // a case
  int64_t pool_mb = 768;  // of weights that calls rotate through, at least one call's
  bool json = false;
};

// sortie bench op: the experts' two grouped GEMMs on random weights out of memory: us, GB/s and %
// of the read bandwidth measured between the runs, and Gop/s and % of the processor's peak.
Status bench_op(const BenchOpOptions& options);

// The one of `known` that --format names.
Result<quant::Format> parse_format(const std::string& name, std::span<const quant::Format> known);

}  // namespace sortie::cli
