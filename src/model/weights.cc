#include "model/weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <new>

#include "base/check.h"
#include "base/log.h"
#include "model/weights_loader.h"
#include "model/weights_walk.h"

namespace sortie::model {
namespace {

using RankWeights = std::vector<std::shared_ptr<const Weights>>;

constexpr std::string_view dialect_name(Dialect d) {
  switch (d) {
    case Dialect::kBf16:
      return "bf16";
    case Dialect::kFp8Block:
      return "fp8_block";
    case Dialect::kW4Afp8:
      return "w4afp8";
    case Dialect::kCompressedTensorsInt8:
      return "w8a8_int8";
    case Dialect::kModelSlim:
      return "msModelSlim's W8A8";
  }
  return "?";
}

constexpr Dialect dialect_of(Quantization q) {
  switch (q) {
    case Quantization::kNone:
      return Dialect::kBf16;
    case Quantization::kFp8Block:
      return Dialect::kFp8Block;
    case Quantization::kW4Afp8:
      return Dialect::kW4Afp8;
    case Quantization::kW8A8Int8:
      return Dialect::kCompressedTensorsInt8;
  }
  return Dialect::kBf16;
}

// Some published int8 folders say nothing in config.json; their users pass --quantization. So a
// flag beside tensors that are quantised already names their dialect.
bool holds(const Checkpoint& checkpoint, DType type) {
  return std::any_of(checkpoint.tensors().begin(), checkpoint.tensors().end(),
                     [&](const auto& t) { return t.second.tensor.dtype == type; });
}

Status reconcile(const std::string& folder, const Config& config, const LoadOptions& options,
                 const Checkpoint& checkpoint, WeightsLoader::Options& out) {
  const Dialect asked = dialect_of(options.quantization);
  out.dialect = config.dialect;
  out.ue8m0 = config.ue8m0_scales;
  out.pack_for = options.pack_for;
  out.int8_static_activations = config.int8_static_activations;
  out.ignore = config.quant_ignore;
  out.description = config.quant_description;
  if (options.quantization == Quantization::kNone || asked == config.dialect) return Status::ok();
  if (asked == Dialect::kCompressedTensorsInt8 && config.dialect == Dialect::kModelSlim) {
    return Status::ok();
  }
  if (config.dialect != Dialect::kBf16) {
    return Status::usage(
        fmt::format("{} is already quantised as {}; --quantization {} does not fit it.", folder,
                    dialect_name(config.dialect), dialect_name(asked)));
  }
  if (holds(checkpoint, asked == Dialect::kFp8Block ? DType::kE4m3 : DType::kI8)) {
    out.dialect = asked;
    return Status::ok();
  }
  out.quantization = options.quantization;
  out.dense_fp8_block = options.dense_fp8_block;
  out.activation_scales = options.activation_scales;
  return Status::ok();
}

int mtp_layers_present(const TensorTable& table, const Config& config) {
  int present = 0;
  while (present < config.num_nextn_predict_layers &&
         table.has_prefix(fmt::format("model.layers.{}.", config.num_hidden_layers + present))) {
    ++present;
  }
  return present;
}

struct IgnoreRule {
  const Config& config;
  int layers;  // that are loaded, MTP layers among them
};

// Tensors that do no harm: derived tables, what a tied or bias-free router does not use, and layers
// past those that the config counts (an MTP layer that it does not name).
bool may_ignore(const void* context, std::string_view name) {
  const auto& rule = *static_cast<const IgnoreRule*>(context);
  if (name.ends_with("rotary_emb.inv_freq")) return true;
  if (name == "lm_head.weight") return rule.config.tie_word_embeddings;
  if (name.ends_with(".e_score_correction_bias") &&
      rule.config.topk_method != ops::TopkMethod::kNoauxTc) {
    return true;
  }
  constexpr std::string_view kLayers = "model.layers.";
  if (!name.starts_with(kLayers)) return false;
  const std::string_view rest = name.substr(kLayers.size());
  int layer = 0;
  const auto parsed = std::from_chars(rest.data(), rest.data() + rest.size(), layer);
  return parsed.ec == std::errc() && parsed.ptr != rest.data() + rest.size() &&
         *parsed.ptr == '.' && layer >= rule.layers;
}

// A checkpoint with all its headers looked at and nothing read. The loader's jobs point into it.
struct Prepared {
  Prepared(std::shared_ptr<const Checkpoint> opened, WeightsLoader::Options how)
      : checkpoint(std::move(opened)), table(*checkpoint) {
    all.checkpoint = checkpoint;
    all.owned = std::make_shared<std::deque<AlignedBuffer>>();
    loader = std::make_unique<WeightsLoader>(*checkpoint, table, std::move(how), *all.owned);
  }
  std::shared_ptr<const Checkpoint> checkpoint;
  TensorTable table;
  Weights all;
  std::vector<ExpertTable> experts;
  std::unique_ptr<WeightsLoader> loader;
};

Result<std::unique_ptr<Prepared>> prepare(const std::string& folder, const Config& config,
                                          const LoadOptions& options, int only_rank) {
  CHECK(options.ranks >= 1 && only_rank < options.ranks);
  if (config.n_routed_experts % options.ranks != 0) {
    return Status::usage(fmt::format("--ep-size {} does not divide the {} experts of {}.",
                                     options.ranks, config.n_routed_experts, folder));
  }
  ASSIGN_OR_RETURN(std::unique_ptr<Checkpoint> opened, Checkpoint::open(folder));
  WeightsLoader::Options how;
  RETURN_IF_ERROR(reconcile(folder, config, options, *opened, how));
  const int share = config.n_routed_experts / options.ranks;
  how.first_expert = only_rank < 0 ? 0 : only_rank * share;
  how.last_expert = only_rank < 0 ? config.n_routed_experts : how.first_expert + share;

  auto p = std::make_unique<Prepared>(std::move(opened), std::move(how));
  const int mtp_layers = mtp_layers_present(p->table, config);
  if (mtp_layers < config.num_nextn_predict_layers) {
    spdlog::info("{} holds {} of the {} MTP layers that its config.json names", folder, mtp_layers,
                 config.num_nextn_predict_layers);
  }
  walk_weights(config, mtp_layers, p->all, p->experts, *p->loader);
  const IgnoreRule rule{config, config.num_hidden_layers + mtp_layers};
  if (const Status s = p->table.finish(may_ignore, &rule); !s.is_ok()) {
    return Status::invalid(fmt::format("{}: {}", folder, s.message()));
  }
  return p;
}

Result<RankWeights> load(const std::string& folder, const Config& config,
                         const LoadOptions& options, int only_rank) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Prepared> p, prepare(folder, config, options, only_rank));
  RETURN_IF_ERROR(p->loader->run("Loading " + folder, options.quiet));
  RETURN_IF_ERROR(p->checkpoint->check());
  share_embeddings(config, p->all);
  RankWeights result;
  for (int r = 0; r < options.ranks; ++r) {
    if (only_rank >= 0 && r != only_rank) continue;
    result.push_back(
        std::make_shared<const Weights>(weights_of_rank(p->all, p->experts, r, options.ranks)));
  }
  return result;
}

}  // namespace

Result<RankWeights> load_weights(const std::string& folder, const Config& config,
                                 const LoadOptions& options, int only_rank) {
  try {
    return load(folder, config, options, only_rank);
  } catch (const std::bad_alloc&) {
    return Status::exhausted(
        fmt::format("There is not enough memory for the weights of {}.", folder));
  }
}

Result<WeightBytes> weight_bytes(const std::string& folder, const Config& config,
                                 const LoadOptions& options) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Prepared> p, prepare(folder, config, options, -1));
  return p->loader->bytes();
}

}  // namespace sortie::model
