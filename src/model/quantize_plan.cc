#include "model/quantize_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <optional>

#include "base/scalar.h"
#include "model/quant_rules.h"
#include "quant/amax.h"

namespace sortie::model {
namespace {

using quant::Format;

bool remove_suffix(std::string_view& text, std::string_view suffix) {
  if (!text.ends_with(suffix)) return false;
  text.remove_suffix(suffix.size());
  return true;
}

// What a tensor's module is, by its name.
LinearKind linear_kind(std::string_view module) {
  constexpr std::array<std::string_view, 8> kDense = {
      "q_proj", "q_a_proj", "q_b_proj",  "kv_a_proj_with_mqa",
      "o_proj", "up_proj",  "gate_proj", "down_proj"};
  const std::string_view last = module.substr(module.rfind('.') + 1);
  if (last == "kv_b_proj") return LinearKind::kKvB;
  if (last == "eh_proj") return LinearKind::kEhProj;
  if (std::find(kDense.begin(), kDense.end(), last) == kDense.end()) return LinearKind::kPlain;
  return module.find(".mlp.experts.") != std::string_view::npos ? LinearKind::kExpert
                                                                : LinearKind::kDense;
}

// "model.layers.L.mlp.experts.E.gate_proj" in parts.
struct ExpertName {
  std::string prefix;  // up to and with "experts.E."
  int64_t layer = 0;
  int64_t expert = 0;
  std::string_view projection;
};

std::optional<ExpertName> expert_name(std::string_view module) {
  constexpr std::string_view kLayers = "model.layers.";
  constexpr std::string_view kExperts = ".mlp.experts.";
  const size_t experts = module.find(kExperts);
  if (!module.starts_with(kLayers) || experts == std::string_view::npos) return std::nullopt;
  ExpertName name;
  const auto number = [](std::string_view digits, int64_t& value) {
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    return error == std::errc() && end == digits.data() + digits.size() && value >= 0;
  };
  const size_t dot = module.rfind('.');
  const size_t begin = experts + kExperts.size();
  if (dot <= begin || dot == std::string_view::npos ||
      !number(module.substr(kLayers.size(), experts - kLayers.size()), name.layer) ||
      !number(module.substr(begin, dot - begin), name.expert)) {
    return std::nullopt;
  }
  name.prefix = module.substr(0, dot + 1);
  name.projection = module.substr(dot + 1);
  return name;
}

class Planner {
 public:
  Planner(const Checkpoint& source, const QuantizeOptions& options)
      : source_(source), options_(options) {}

  Result<std::vector<QuantizeShard>> plan() {
    shards_.resize(source_.shard_paths().size());
    for (size_t i = 0; i < shards_.size(); ++i) {
      shards_[i].file_name = std::filesystem::path(source_.shard_paths()[i]).filename();
    }
    for (const auto& [name, entry] : source_.tensors()) RETURN_IF_ERROR(add(name, entry));
    if (quantised_ == 0) {
      return Status::usage(
          fmt::format("{} has no tensors that this format quantises.", options_.in));
    }
    for (QuantizeShard& shard : shards_) {
      std::sort(shard.pieces.begin(), shard.pieces.end(),
                [](const auto& a, const auto& b) { return a.outputs[0].name < b.outputs[0].name; });
    }
    return std::move(shards_);
  }

 private:
  Status add(const std::string& name, const Checkpoint::Entry& entry) {
    std::vector<QuantizePiece>& pieces = shards_[static_cast<size_t>(entry.shard)].pieces;
    if (name.ends_with(".input_scale")) {
      return Status::invalid(
          fmt::format("{} holds {}: it is quantised already.", options_.in, name));
    }
    std::string_view module = name;
    if (remove_suffix(module, ".weight_scale_inv")) {
      // Goes with its weight where that is converted, and is copied with it otherwise.
      if (converts(std::string(module))) return Status::ok();
      pieces.push_back(copy(name, entry.tensor));
      return Status::ok();
    }
    module = name;
    if (!remove_suffix(module, ".weight") || !converts(std::string(module))) {
      if (entry.tensor.dtype == DType::kE4m3 && !source_.find(name + "_scale_inv")) {
        return Status::invalid(fmt::format("{} lacks {}_scale_inv.", options_.in, name));
      }
      pieces.push_back(copy(name, entry.tensor));
      return Status::ok();
    }
    QuantizePiece piece;
    RETURN_IF_ERROR(read_source(name, entry.tensor, piece));
    convert(name, std::string(module), piece);
    pieces.push_back(std::move(piece));
    return add_input_scale(module, pieces);
  }

  bool is_fp8(const std::string& module) const {
    const Tensor* weight = source_.find(module + ".weight");
    return weight != nullptr && weight->dtype == DType::kE4m3;
  }
  // kBf16: keeps the source's form.
  Format target(std::string_view module) const {
    return quantised_format(options_.format, options_.dense_fp8_block, linear_kind(module));
  }
  // w8a8_int8 leaves kv_b_proj alone, and has no place for an fp8 one.
  bool to_bf16(const std::string& module) const {
    return options_.format == Quantization::kW8A8Int8 && is_fp8(module) &&
           target(module) == Format::kBf16;
  }
  bool converts(const std::string& module) const {
    const Format to = target(module);
    if (to == Format::kFp8Block && is_fp8(module)) return false;
    return to != Format::kBf16 || to_bf16(module);
  }

  static QuantizePiece copy(const std::string& name, const Tensor& t) {
    QuantizePiece piece;
    piece.source = t;
    piece.outputs.push_back({name, t.dtype, {t.shape.begin(), t.shape.begin() + t.rank}});
    return piece;
  }

  Status read_source(const std::string& name, const Tensor& t, QuantizePiece& piece) {
    piece.source = t;
    if (t.rank != 2 || t.shape[0] < 1 || t.shape[1] < 1) {
      return Status::invalid(fmt::format("{} of {} is not a matrix.", name, options_.in));
    }
    piece.matrix = {.n = t.shape[0], .k = t.shape[1], .codes = t.data};
    switch (t.dtype) {
      case DType::kBf16:
        piece.matrix.format = Format::kBf16;
        return Status::ok();
      case DType::kF32:
        piece.matrix.format = Format::kF32;
        return Status::ok();
      case DType::kE4m3:
        piece.matrix.format = Format::kFp8Block;
        return read_source_scales(name, piece);
      default:
        return Status::invalid(
            fmt::format("{} of {} is {}; BF16, F32 and F8_E4M3 can be quantised.", name,
                        options_.in, dtype_name(t.dtype)));
    }
  }

  Status read_source_scales(const std::string& name, QuantizePiece& piece) {
    const Tensor* scales = source_.find(name + "_scale_inv");
    const int64_t rows = quant::ceil_div(piece.matrix.n, quant::kGroup);
    if (scales == nullptr || (scales->dtype != DType::kF32 && scales->dtype != DType::kE8m0) ||
        scales->rank != 2 || scales->shape[0] != rows ||
        scales->shape[1] != piece.matrix.k_groups()) {
      return Status::invalid(fmt::format("{} needs {}_scale_inv, F32 or F8_E8M0 [{}, {}].",
                                         options_.in, name, rows, piece.matrix.k_groups()));
    }
    piece.source_scales = *scales;
    return Status::ok();
  }

  void convert(const std::string& name, const std::string& module, QuantizePiece& piece) {
    const int64_t n = piece.matrix.n;
    const int64_t k = piece.matrix.k;
    const int64_t groups = piece.matrix.k_groups();
    if (to_bf16(module)) {
      piece.kind = QuantizePiece::Kind::kToBf16;
      piece.outputs = {{name, DType::kBf16, {n, k}}};
      return;
    }
    ++quantised_;
    piece.kind = QuantizePiece::Kind::kQuantise;
    piece.to = target(module);
    if (piece.to == Format::kW4Afp8) {
      piece.outputs = {{name, DType::kI8, {n, quant::ceil_div(k, 2)}},
                       {name + "_scale_inv", DType::kF32, {n, groups}}};
    } else if (piece.to == Format::kFp8Block) {
      piece.outputs = {
          {name, DType::kE4m3, {n, k}},
          {name + "_scale_inv", DType::kF32, {quant::ceil_div(n, quant::kGroup), groups}}};
    } else {
      piece.outputs = {{name, DType::kI8, {n, k}}, {name + "_scale", DType::kBf16, {n, 1}}};
    }
  }

  // experts.E.w1, w2, w3.input_scale for gate, down, up: what DeepSeek's own code calls them.
  Status add_input_scale(std::string_view module, std::vector<QuantizePiece>& pieces) {
    const std::optional<ExpertName> expert = expert_name(module);
    if (options_.expert_amax.empty() || !expert) return Status::ok();
    const auto layer = static_cast<size_t>(expert->layer);
    if (layer >= options_.expert_amax.size() || options_.expert_amax[layer].empty()) {
      return Status::ok();
    }
    const auto& experts = options_.expert_amax[layer];
    const size_t gemm = expert->projection == "down_proj" ? 1 : 0;
    if (static_cast<size_t>(expert->expert) >= experts.size()) {
      return Status::internal(fmt::format("The calibration lacks {}.", module));
    }
    float amax = experts[static_cast<size_t>(expert->expert)][gemm];
    if (amax < quant::kZeroAmax) {
      for (const auto& other : experts) amax = std::max(amax, other[gemm]);
    }
    if (!std::isfinite(amax) || amax < quant::kZeroAmax) {
      return Status::invalid(fmt::format(
          "The calibration gave {} for layer {}; it needs text that the model can read.", amax,
          expert->layer));
    }
    QuantizePiece piece;
    piece.kind = QuantizePiece::Kind::kValue;
    piece.value = input_scale(amax);
    const char* w = gemm == 1 ? "w2" : expert->projection == "gate_proj" ? "w1" : "w3";
    piece.outputs = {{expert->prefix + w + ".input_scale", DType::kF32, {1}}};
    pieces.push_back(std::move(piece));
    return Status::ok();
  }

  const Checkpoint& source_;
  const QuantizeOptions& options_;
  std::vector<QuantizeShard> shards_;
  int64_t quantised_ = 0;
};

}  // namespace

int64_t QuantizeOutput::bytes() const {
  int64_t n = dtype_bytes(dtype);
  for (const int64_t d : shape) n *= d;
  return n;
}

float input_scale(float amax) { return round_to_bf16(amax / kE4m3Max); }

Result<std::vector<QuantizeShard>> plan_quantize(const Checkpoint& source,
                                                 const QuantizeOptions& options) {
  return Planner(source, options).plan();
}

}  // namespace sortie::model
