#pragma once

#include <cstdint>

#include "model/config.h"
#include "quant/matrix.h"

namespace sortie::model {

// In which formats a model's matrices are held; what --quantization and the checkpoint decide.
struct Formats {
  quant::Format experts = quant::Format::kBf16;
  quant::Format linears = quant::Format::kBf16;  // attention, dense and shared MLPs
  quant::Format cache = quant::Format::kF32;     // latents: kF32 or kBf16
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

// Sizes that no machine has stop at the largest int64.
MemoryPlan memory_plan(const Config& config, const Formats& formats);

// How much one rank has at once, as its options say.
struct RankLoad {
  int64_t cache_tokens = 0;  // positions of the latent cache, whole pages
  int64_t cache_layers = 0;  // layers that have one
  quant::Format cache_format = quant::Format::kF32;
  int64_t context_length = 0;  // positions of the rope table
  int64_t step_rows = 0;       // prompt and decode rows of the largest step
  int64_t decode_rows = 0;     // decode rows among them
  int64_t decode_segment = 1;  // S
};

// Bytes of the latent cache, and of the activations of the largest step with the rope table.
// Experts are taken to get their even share of the rows: a rank's own rows times top-k.
int64_t cache_bytes(const Config& config, const RankLoad& load);
int64_t scratch_bytes(const Config& config, const RankLoad& load);

}  // namespace sortie::model
