#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/arena.h"
#include "base/status.h"
#include "model/config.h"
#include "model/safetensors.h"
#include "ops/ops.h"
#include "quant/matrix.h"

namespace sortie::model {

// A linear of the network: its matrix and, where the checkpoint has one, its bias.
struct LinearWeights {
  quant::Matrix w;
  const float* bias = nullptr;  // [n] or null
};

struct MlpWeights {  // dense layers and shared experts
  LinearWeights gate, up, down;
};

struct MoeWeights {
  quant::Matrix router;                    // [experts, hidden], kBf16 or kF32
  const float* correction_bias = nullptr;  // [experts] fp32 (noaux_tc) or null
  // This rank's experts: gate_up[2e], gate_up[2e+1] = gate, up of local expert e.
  std::vector<quant::Matrix> gate_up;
  std::vector<quant::Matrix> down;
  MlpWeights shared;  // n_shared_experts fused to one MLP; w.n = 0 if there is none
};

struct LayerWeights {
  ops::NormWeight input_norm, post_attention_norm;
  LinearWeights q;  // q_proj, if q_lora_rank = 0
  LinearWeights q_a, q_b;
  ops::NormWeight q_a_norm;
  LinearWeights kv_a;  // kv_a_proj_with_mqa
  ops::NormWeight kv_a_norm;
  quant::Matrix kv_b;  // in rows; quantised codes are dequantised where they are used
  LinearWeights o;
  bool is_moe = false;
  MlpWeights mlp;  // !is_moe
  MoeWeights moe;  // is_moe
};

struct MtpWeights {
  ops::NormWeight enorm, hnorm;
  LinearWeights eh_proj;  // [hidden, 2 * hidden]
  LayerWeights layer;
  ops::NormWeight head_norm;  // shared_head.norm
  quant::Matrix embed, head;  // the model's own where the file has no copies
};

struct Weights {
  quant::Matrix embed;  // [vocab, hidden]
  std::vector<LayerWeights> layers;
  ops::NormWeight final_norm;
  quant::Matrix lm_head;
  std::vector<MtpWeights> mtp;

  // What keeps the pointers alive: the mapped file and what had to be made.
  std::shared_ptr<const Checkpoint> checkpoint;
  std::shared_ptr<std::deque<AlignedBuffer>> owned;
};

enum class Quantization : uint8_t { kNone, kFp8Block, kW4Afp8, kW8A8Int8 };

struct LoadOptions {
  Quantization quantization = Quantization::kNone;  // of a bf16 checkpoint, while loading
  bool dense_fp8_block = false;                     // w4afp8: the other linears as fp8_block
  // Static activation scales by (layer, GEMM) from a calibration, empty = dynamic: scale[layer][0]
  // for GEMM 1, [1] for GEMM 2; layers without experts hold zeros.
  std::vector<std::array<float, 2>> activation_scales;
  // Packs linears and experts into this backend's own layout (ops::Backend::pack); null = rows.
  const ops::Backend* pack_for = nullptr;
  int ranks = 1;       // experts are split contiguously
  bool quiet = false;  // no progress bar
};

// Bytes that load_weights takes, from the config and the files' headers alone.
struct WeightBytes {
  struct Part {
    int64_t mapped = 0;  // used where the files are mapped: processes of a host share these pages
    int64_t made = 0;    // converted or quantised while loading: every process has its own
  };
  Part experts;  // of all ranks together
  Part rest;
};
// Refuses a checkpoint as load_weights does, before anything is read.
Result<WeightBytes> weight_bytes(const std::string& folder, const Config& config,
                                 const LoadOptions& options);

// Loads the weights of all ranks of this process: [ranks] if `only_rank` < 0, else just that rank's
// (vector of one). Ranks of one process share everything but their experts. Missing, extra,
// misshapen and mistyped tensors are listed by name in one error.
Result<std::vector<std::shared_ptr<const Weights>>> load_weights(const std::string& folder,
                                                                 const Config& config,
                                                                 const LoadOptions& options,
                                                                 int only_rank = -1);

}  // namespace sortie::model
