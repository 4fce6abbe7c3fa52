#pragma once

#include <cstdint>

#include "base/status.h"
#include "quant/matrix.h"

namespace sortie::cuda {

// One grouped GEMM over random weights, as `sortie bench op --device cuda` times it.
struct GemmBench {
  quant::Format format = quant::Format::kW4Afp8;
  int experts = 32;  // that have rows
  int64_t rows = 8;  // an expert
  int64_t n = 0;     // of one matrix
  int64_t k = 0;
  int parts = 1;  // 2: GEMM 1, with SwiGLU where that is fused, else with fp32 results
};
struct GemmTime {
  double us = 0;       // a call
  double read_us = 0;  // a read-only kernel's over the same bytes of weights
  bool fused = false;
  int64_t bytes = 0;  // of weights and scales
  int64_t moved = 0;  // of those, rows and results
};

// Replays of a graph of 12 calls that rotate through sets of weights larger than the L2 cache, the
// median of 15; the read-only kernel is rotated and replayed in the same way, right after.
Result<GemmTime> bench_grouped_gemm(const GemmBench& bench);

}  // namespace sortie::cuda
