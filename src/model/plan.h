#pragma once

#include <cstdint>

#include "model/config.h"
#include "quant/matrix.h"

namespace sortie::model {

// In which formats a model's matrices are held; what --quantization and the checkpoint decide.
struct Formats {
  quant::Format experts = quant::Format::kBf16;
  quant::Format linears = quant::Format::kBf16;  // attention, dense and shared MLPs
};

// Bytes that a model needs and moves, from its config alone, before anything is loaded.
struct MemoryPlan {
  int64_t parameters = 0;         // of the main model
  int64_t active_parameters = 0;  // that one token meets
  int64_t expert_bytes = 0;       // all routed experts of all ranks
  int64_t dense_bytes = 0;        // all the rest, held by each process once
  int64_t cache_bytes_per_token = 0;
  // What one decoded token must read at depth 0 and batch 1: everything but the embedding table,
  // top-k experts a layer.
  int64_t bytes_per_token = 0;
};

MemoryPlan memory_plan(const Config& config, const Formats& formats);

}  // namespace sortie::model
