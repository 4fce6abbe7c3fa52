#include "model/random_checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <new>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "model/quant_rules.h"
#include "model/safetensors.h"
#include "model/weight_memory.h"
#include "model/weights_walk.h"
#include "quant/matrix_ops.h"

namespace sortie::model {

using quant::ceil_div;
using quant::Format;
using quant::kGroup;
using quant::Matrix;

namespace {

Format stored_format(Dialect dialect, LinearKind kind) {
  return quantised_format(quantization_of(dialect), /*dense_fp8_block=*/true, kind);
}

// 8 random bytes at a time, each and-ed and or-ed with a pattern that makes sane codes of them.
// splitmix64 (Steele, Lea, Flood 2014), seeded by the tensor's name.
void fill(uint64_t seed, const std::string& name, uint64_t keep, uint64_t set, std::byte* out,
          int64_t bytes) {
  uint64_t state = seed ^ 0xcbf29ce484222325u;
  for (const char c : name) state = (state ^ static_cast<uint8_t>(c)) * 0x100000001b3u;  // FNV-1a
  for (int64_t i = 0; i < bytes; i += 8) {
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z = ((z ^ (z >> 31)) & keep) | set;
    std::memcpy(out + i, &z, static_cast<size_t>(std::min<int64_t>(8, bytes - i)));
  }
}

// Weights are +-[step, 2 step) with step = 2^-floor(log2(k) / 2), about 1 / sqrt(k): rows of
// activations keep their size through a layer.
int step_exponent(int64_t k) { return -static_cast<int>(std::log2(static_cast<double>(k)) / 2); }

void random_codes(Format format, int64_t k, uint64_t seed, const std::string& name, std::byte* out,
                  int64_t bytes) {
  uint64_t keep = ~uint64_t{0};
  uint64_t set = 0;
  if (format == Format::kBf16) {  // sign and fraction are random, the exponent is not
    keep = 0x807f807f807f807fu;
    set = 0x0001000100010001u * static_cast<uint64_t>((127 + step_exponent(k)) << 7);
  } else if (format == Format::kFp8Block) {  // +-[1, 2)
    keep = 0x8787878787878787u;
    set = 0x3838383838383838u;
  } else if (format == Format::kW8A8Int8) {
    set = 0x0101010101010101u;  // never -128
  }
  fill(seed, name, keep, set, out, bytes);
}

float scale_of(Format format, int64_t k) {
  const float step = std::ldexp(1.0f, step_exponent(k));
  switch (format) {
    case Format::kW4Afp8:
      return step / 4;
    case Format::kW8A8Int8:
      return step / 64;
    default:
      return step;
  }
}

class InMemory : public WeightVisitor {
 public:
  InMemory(Dialect dialect, uint64_t seed, int first_expert, int last_expert,
           const ops::Backend* pack_for, std::deque<AlignedBuffer>& owned)
      : dialect_(dialect),
        seed_(seed),
        first_expert_(first_expert),
        last_expert_(last_expert),
        pack_for_(pack_for),
        memory_(owned) {}

  void matrix(const MatrixSpec& spec, Matrix& out) override {
    out = Matrix{.format = stored_format(dialect_, spec.kind), .n = spec.n, .k = spec.k};
    if (spec.kind == LinearKind::kExpert &&
        (spec.expert < first_expert_ || spec.expert >= last_expert_)) {
      return;
    }
    const int64_t packed = spec.kind == LinearKind::kKvB ? 0 : packed_bytes(out);
    const int64_t bytes = quant::code_bytes(out.format, out.n, out.k);
    const AlignedBuffer passing(packed > 0 ? static_cast<size_t>(bytes) : 0);
    std::byte* codes = packed > 0 ? passing.data() : memory_.allocate(bytes);
    random_codes(out.format, out.k, seed_, spec.module, codes, bytes);
    out.codes = codes;
    const float scale = scale_of(out.format, out.k);
    const auto scale_bytes = quant::scale_bytes(out.format, out.n, out.k);
    if (out.format == Format::kW4Afp8) {
      auto* scales = reinterpret_cast<bf16*>(memory_.allocate(scale_bytes));
      std::fill(scales, scales + scale_bytes / 2, to_bf16(scale));
      out.scales = scales;
    } else if (scale_bytes > 0) {
      auto* scales = reinterpret_cast<float*>(memory_.allocate(scale_bytes));
      std::fill(scales, scales + scale_bytes / 4, scale);
      out.scales = scales;
    }
    if (packed > 0) {
      std::byte* tiles = memory_.allocate(packed);
      pack_for_->pack(out, tiles);
      out.codes = tiles;
      out.layout = quant::Layout::kTiles;
      if (out.format == Format::kW4Afp8) out.scales = nullptr;  // they are in the tiles
    }
  }

  void vector(const std::string& /*name*/, int64_t n, VectorKind kind, const float*& out) override {
    auto* values = reinterpret_cast<float*>(memory_.allocate(n * 4));
    std::fill(values, values + n, kind == VectorKind::kNorm ? 1.0f : 0.0f);
    out = values;
  }
  bool has(const std::string& /*name*/) override { return false; }
  void experts_done(const std::string& /*prefix*/, int /*layer*/, ExpertTable& /*t*/) override {}

 private:
  int64_t packed_bytes(const Matrix& m) const {
    return pack_for_ == nullptr || pack_for_->pack == nullptr ? 0 : pack_for_->packed_bytes(m);
  }

  const Dialect dialect_;
  const uint64_t seed_;
  const int first_expert_;
  const int last_expert_;
  const ops::Backend* const pack_for_;
  WeightMemory memory_;
};

// The tensors of a file and how each is made.
class OnDisk : public WeightVisitor {
 public:
  OnDisk(Dialect dialect, uint64_t seed) : dialect_(dialect), seed_(seed) {}

  void matrix(const MatrixSpec& spec, Matrix& /*out*/) override {
    const Format format = stored_format(dialect_, spec.kind);
    const std::string name = spec.module + ".weight";
    const int64_t groups = ceil_div(spec.k, kGroup);
    const float scale = scale_of(format, spec.k);
    const auto codes = [=, this, module = spec.module, k = spec.k](std::byte* out, int64_t bytes) {
      random_codes(format, k, seed_, module, out, bytes);
    };
    switch (format) {
      case Format::kFp8Block:
        add(name, DType::kE4m3, {spec.n, spec.k}, codes);
        add_floats(name + "_scale_inv", {ceil_div(spec.n, kGroup), groups}, scale);
        break;
      case Format::kW4Afp8:
        add(name, DType::kI8, {spec.n, ceil_div(spec.k, 2)}, codes);
        add_floats(name + "_scale_inv", {spec.n, groups}, scale);
        break;
      case Format::kW8A8Int8:
        add(name, DType::kI8, {spec.n, spec.k}, codes);
        add_bf16s(name + "_scale", {spec.n, 1}, scale);
        break;
      default:
        add(name, DType::kBf16, {spec.n, spec.k}, codes);
    }
  }
  void vector(const std::string& name, int64_t n, VectorKind kind, const float*& /*out*/) override {
    if (kind == VectorKind::kCorrectionBias) {
      add_floats(name, {n}, 0);
    } else {
      add_bf16s(name, {n}, kind == VectorKind::kNorm ? 1.0f : 0.0f);
    }
  }
  bool has(const std::string& /*name*/) override { return false; }
  void experts_done(const std::string& /*prefix*/, int /*layer*/, ExpertTable& /*t*/) override {}

  Status write(const std::string& path) {
    // Wide scalars first, so that every tensor is aligned and can be used in place.
    std::stable_sort(tensors_.begin(), tensors_.end(), [](const auto& a, const auto& b) {
      return dtype_bytes(a.dtype) > dtype_bytes(b.dtype);
    });
    SafetensorsWriter writer;
    for (const auto& t : tensors_) writer.declare(t.name, t.dtype, t.shape);
    RETURN_IF_ERROR(writer.open(path));
    std::vector<std::byte> buffer;
    for (const auto& t : tensors_) {
      int64_t bytes = dtype_bytes(t.dtype);
      for (const int64_t d : t.shape) bytes *= d;
      buffer.resize(static_cast<size_t>(bytes));
      t.make(buffer.data(), bytes);
      RETURN_IF_ERROR(writer.write(buffer.data(), bytes));
    }
    return writer.finish();
  }

 private:
  using Make = std::function<void(std::byte*, int64_t)>;
  struct Made {
    std::string name;
    DType dtype;
    std::vector<int64_t> shape;
    Make make;
  };
  void add(const std::string& name, DType dtype, std::vector<int64_t> shape, Make make) {
    tensors_.push_back({name, dtype, std::move(shape), std::move(make)});
  }
  void add_floats(const std::string& name, std::vector<int64_t> shape, float value) {
    add(name, DType::kF32, std::move(shape), [value](std::byte* out, int64_t bytes) {
      for (int64_t i = 0; i < bytes; i += 4) std::memcpy(out + i, &value, 4);
    });
  }
  void add_bf16s(const std::string& name, std::vector<int64_t> shape, float value) {
    const bf16 b = to_bf16(value);
    add(name, DType::kBf16, std::move(shape), [b](std::byte* out, int64_t bytes) {
      for (int64_t i = 0; i < bytes; i += 2) std::memcpy(out + i, &b, 2);
    });
  }

  const Dialect dialect_;
  const uint64_t seed_;
  std::vector<Made> tensors_;
};

nlohmann::json quantization_json(Dialect dialect) {
  if (dialect == Dialect::kFp8Block) {
    return {{"quant_method", "fp8"},
            {"fmt", "e4m3"},
            {"activation_scheme", "dynamic"},
            {"weight_block_size", {128, 128}}};
  }
  if (dialect == Dialect::kW4Afp8) return {{"quant_method", "w4afp8"}};
  if (dialect == Dialect::kCompressedTensorsInt8) return {{"quant_method", "w8a8_int8"}};
  return nullptr;
}

Status write_text(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  if (file.fail()) return Status::invalid(fmt::format("Cannot write {}.", path));
  return Status::ok();
}

}  // namespace

std::string config_json(const Config& c, Dialect dialect) {
  constexpr const char* kMethods[] = {"greedy", "group_limited_greedy", "noaux_tc"};
  nlohmann::json j = {
      {"model_type", c.model_type},
      {"vocab_size", c.vocab_size},
      {"hidden_size", c.hidden_size},
      {"intermediate_size", c.intermediate_size},
      {"moe_intermediate_size", c.moe_intermediate_size},
      {"num_hidden_layers", c.num_hidden_layers},
      {"num_nextn_predict_layers", c.num_nextn_predict_layers},
      {"num_attention_heads", c.num_attention_heads},
      {"num_key_value_heads", c.num_attention_heads},
      {"n_shared_experts", c.n_shared_experts},
      {"n_routed_experts", c.n_routed_experts},
      {"num_experts_per_tok", c.num_experts_per_tok},
      {"n_group", c.n_group},
      {"topk_group", c.topk_group},
      {"first_k_dense_replace", c.first_k_dense_replace},
      {"moe_layer_freq", c.moe_layer_freq},
      {"routed_scaling_factor", c.routed_scaling_factor},
      {"norm_topk_prob", c.norm_topk_prob},
      {"scoring_func", c.scoring_func == ops::Scoring::kSigmoid ? "sigmoid" : "softmax"},
      {"topk_method", kMethods[static_cast<size_t>(c.topk_method)]},
      {"kv_lora_rank", c.kv_lora_rank},
      {"qk_nope_head_dim", c.qk_nope_head_dim},
      {"qk_rope_head_dim", c.qk_rope_head_dim},
      {"v_head_dim", c.v_head_dim},
      {"attention_bias", c.attention_bias},
      {"tie_word_embeddings", c.tie_word_embeddings},
      {"rms_norm_eps", c.rms_norm_eps},
      {"rope_theta", c.rope_theta},
      {"max_position_embeddings", c.max_position_embeddings},
      {"eos_token_id", c.eos_token_ids},
  };
  if (c.q_lora_rank > 0) j["q_lora_rank"] = c.q_lora_rank;
  if (c.bos_token_id >= 0) j["bos_token_id"] = c.bos_token_id;
  if (const RopeScaling& r = c.rope_scaling; r.factor > 0) {
    j["rope_scaling"] = {{"type", "yarn"},
                         {"factor", r.factor},
                         {"beta_fast", r.beta_fast},
                         {"beta_slow", r.beta_slow},
                         {"mscale", r.mscale},
                         {"mscale_all_dim", r.mscale_all_dim},
                         {"original_max_position_embeddings", r.original_max_position}};
  }
  if (nlohmann::json q = quantization_json(dialect); !q.is_null()) {
    j["quantization_config"] = std::move(q);
  }
  return j.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

Result<std::shared_ptr<const Weights>> random_weights(const Config& config, Dialect dialect,
                                                      int rank, int ranks, uint64_t seed,
                                                      const ops::Backend* pack_for) {
  CHECK(ranks >= 1 && rank >= 0 && rank < ranks);
  if (config.n_routed_experts % ranks != 0) {
    return Status::usage(fmt::format("{} ranks do not divide the model's {} experts.", ranks,
                                     config.n_routed_experts));
  }
  const int share = config.n_routed_experts / ranks;
  try {
    Weights all;
    all.owned = std::make_shared<std::deque<AlignedBuffer>>();
    std::vector<ExpertTable> tables;
    InMemory visitor(dialect, seed, rank * share, (rank + 1) * share, pack_for, *all.owned);
    walk_weights(config, config.num_nextn_predict_layers, all, tables, visitor);
    share_embeddings(config, all);
    return std::make_shared<const Weights>(weights_of_rank(all, tables, rank, ranks));
  } catch (const std::bad_alloc&) {
    return Status::exhausted("There is not enough memory for the random weights.");
  }
}

Status write_random_checkpoint(const std::string& folder, const Config& config, Dialect dialect,
                               uint64_t seed) {
  OnDisk visitor(dialect, seed);
  Weights shapes;
  std::vector<ExpertTable> tables;
  walk_weights(config, config.num_nextn_predict_layers, shapes, tables, visitor);
  RETURN_IF_ERROR(visitor.write(folder + "/model.safetensors"));
  return write_text(folder + "/config.json", config_json(config, dialect));
}

}  // namespace sortie::model
