#pragma once

#include <string>
#include <vector>

#include "base/status.h"

namespace sortie::cli {

struct BenchModelOptions {
  std::string shape = "v2-lite";  // v2-lite, or a folder with config.json
  std::string format = "w4afp8";  // bf16, fp8_block, w4afp8 (fp8_block linears), w8a8_int8
  int layers = 0;                 // 0 = all of the shape's
  int ep_size = 1;
  int threads = 0;               // a rank; 0 = its share
  std::vector<int> batch = {1};  // decode rows a rank (bench decode), tokens a rank (bench moe)
  std::vector<int> depth = {0};  // tokens already in the cache
  int prefill = 0;               // also time a prompt of so many tokens
  std::string kv_cache_dtype = "fp32";  // or bf16
  int steps = 8;
  bool json = false;
};

// sortie bench decode: whole decode steps of a model with random weights made in memory: ms a step,
// tokens/s, GB/s and % of the read bandwidth measured between the steps, and the parts of a step.
Status bench_decode(const BenchModelOptions& options);

// sortie bench moe: the MoE layers of such a model alone, gate to combined output, us a layer.
Status bench_moe(const BenchModelOptions& options);

}  // namespace sortie::cli
