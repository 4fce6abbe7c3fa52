#include "cli/ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <set>
#include <span>
#include <utility>

#include "base/hash.h"
#include "base/host.h"
#include "base/json.h"
#include "base/log.h"
#include "cli/calibrate.h"
#include "cli/devices.h"
#include "cli/memory_check.h"
#include "cli/placement.h"
#if SORTIE_HAS_CUDA
#include "exchange/gpu.h"
#endif
#include "exchange/local.h"
#if SORTIE_HAS_UCX
#include "exchange/ucx.h"
#endif
#include "model/quant_rules.h"
#include "model/upload.h"

namespace sortie::cli {

namespace {

using model::Dialect;
using model::Quantization;

constexpr std::pair<const char*, Quantization> kQuantizations[] = {
    {"bf16", Quantization::kNone},
    {"fp8_block", Quantization::kFp8Block},
    {"w4afp8", Quantization::kW4Afp8},
    {"w8a8_int8", Quantization::kW8A8Int8}};

// What the weights are once they are loaded; a flag that parse_quantization refuses counts as none.
Quantization quantization_of(const model::Config& config, const RunOptions& options) {
  if (config.dialect != Dialect::kBf16) return model::quantization_of(config.dialect);
  const auto asked = parse_quantization("--quantization", options.quantization);
  return asked.is_ok() ? *asked : Quantization::kNone;
}

int64_t matrix_bytes(const quant::Matrix& m) { return m.n == 0 ? 0 : m.bytes(); }

int64_t mlp_bytes(const model::MlpWeights& w) {
  return matrix_bytes(w.gate.w) + matrix_bytes(w.up.w) + matrix_bytes(w.down.w);
}

// Bytes of a rank's matrices: experts alone, and all the rest.
std::pair<int64_t, int64_t> matrix_bytes_of(const model::Weights& w) {
  int64_t experts = 0;
  int64_t rest = matrix_bytes(w.embed) + matrix_bytes(w.lm_head);
  const auto add = [&](const model::LayerWeights& l) {
    for (const auto* m : {&l.q, &l.q_a, &l.q_b, &l.kv_a, &l.o}) rest += matrix_bytes(m->w);
    rest += matrix_bytes(l.kv_b);
    rest += l.is_moe ? mlp_bytes(l.moe.shared) + matrix_bytes(l.moe.router) : mlp_bytes(l.mlp);
    for (const quant::Matrix& m : l.moe.gate_up) experts += matrix_bytes(m);
    for (const quant::Matrix& m : l.moe.down) experts += matrix_bytes(m);
  };
  for (const model::LayerWeights& l : w.layers) add(l);
  for (const model::MtpWeights& m : w.mtp) {
    rest += matrix_bytes(m.eh_proj.w);
    add(m.layer);
  }
  return {experts, rest};
}

std::string mib(int64_t bytes) {
  return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / 1048576.0);
}

Status check(const RunOptions& o) {
  const auto at_least = [](std::string_view flag, int64_t value, int64_t least) {
    return value >= least
               ? Status::ok()
               : Status::usage(fmt::format("{} {}: must be at least {}", flag, value, least));
  };
  RETURN_IF_ERROR(at_least("--ep-size", o.ep_size, 0));
  RETURN_IF_ERROR(at_least("--threads", o.threads, 0));
  RETURN_IF_ERROR(at_least("--max-running-requests", o.max_running_requests, 1));
  RETURN_IF_ERROR(at_least("--chunked-prefill-size", o.chunked_prefill_size, 1));
  RETURN_IF_ERROR(at_least("--context-length", o.context_length, 0));
  RETURN_IF_ERROR(at_least("--page-size", o.page_size, 1));
  RETURN_IF_ERROR(at_least("--max-total-tokens", o.max_total_tokens, 0));
  RETURN_IF_ERROR(at_least("--decode-segment", o.decode_segment, 0));
  RETURN_IF_ERROR(at_least("--max-dispatch-tokens", o.max_dispatch_tokens, 0));
  const int64_t most = std::numeric_limits<int32_t>::max();  // positions, rows and pages are int32
  for (const auto& [flag, value] :
       {std::pair{"--max-running-requests", int64_t{o.max_running_requests}},
        std::pair{"--chunked-prefill-size", o.chunked_prefill_size},
        std::pair{"--context-length", o.context_length}, std::pair{"--page-size", o.page_size},
        std::pair{"--max-dispatch-tokens", o.max_dispatch_tokens}}) {
    if (value > most) return Status::usage(fmt::format("{} {}: at most {}", flag, value, most));
  }
  if (o.max_total_tokens / o.page_size >= most) {
    return Status::usage(fmt::format("--max-total-tokens {} are more than {} pages of {}",
                                     o.max_total_tokens, most, o.page_size));
  }
  if (!(o.mem_fraction_static >= 0 && o.mem_fraction_static < 1)) {
    return Status::usage(fmt::format("--mem-fraction-static {}: must be above 0 and below 1",
                                     o.mem_fraction_static));
  }
  if (o.kv_cache_dtype != "auto" && o.kv_cache_dtype != "fp32" && o.kv_cache_dtype != "bf16") {
    return Status::usage(
        fmt::format("--kv-cache-dtype {} is unknown: take auto, fp32 or bf16", o.kv_cache_dtype));
  }
  if (o.on_rank_loss != "fail" && o.on_rank_loss != "degrade") {
    return Status::usage(
        fmt::format("--on-rank-loss {} is unknown: take fail or degrade", o.on_rank_loss));
  }
  if (o.exchange_timeout <= 0 || o.step_timeout <= 0 || o.dist_timeout <= 0) {
    return Status::usage("--exchange-timeout, --step-timeout and --dist-timeout must be above 0 s");
  }
  if (!o.dense.empty() && o.dense != "fp8_block") {
    return Status::usage(fmt::format("--dense {} is unknown: take fp8_block", o.dense));
  }
  if (!o.calibrate.empty() && o.quantization != "w4afp8") {
    return Status::usage("--calibrate makes static scales for w4afp8: add --quantization w4afp8");
  }
  return Status::ok();
}

}  // namespace

Result<exchange::Mode> parse_mode(const std::string& name) {
  if (name == "auto") return exchange::Mode::kAuto;
  if (name == "low_latency") return exchange::Mode::kLowLatency;
  if (name == "normal") return exchange::Mode::kNormal;
  return Status::usage(
      fmt::format("--deepep-mode {} is unknown: take auto, low_latency or normal", name));
}

Result<Quantization> parse_quantization(const char* flag, const std::string& name) {
  if (name.empty()) return Quantization::kNone;
  if (name == "fp8") return Quantization::kFp8Block;
  for (const auto& [known, quantization] : kQuantizations) {
    if (name == known) return quantization;
  }
  return Status::usage(fmt::format(
      "{} {} is unknown: take bf16, fp8_block (or fp8), w4afp8 or w8a8_int8", flag, name));
}

Result<model::LoadOptions> load_options(const RunOptions& o) {
  ASSIGN_OR_RETURN(const Quantization quantization,
                   parse_quantization("--quantization", o.quantization));
  ASSIGN_OR_RETURN(const Device device, choose_device(o.device));
  return model::LoadOptions{.quantization = quantization,
                            .dense_fp8_block = o.dense == "fp8_block",
                            .pack_for = device.host,
                            .ranks = o.ep_size,
                            .quiet = o.quiet};
}

std::string quantization_name(const model::Config& config, const RunOptions& options) {
  const Quantization held = quantization_of(config, options);
  for (const auto& [name, quantization] : kQuantizations) {
    if (held == quantization) return name;
  }
  return "";
}

Result<model::Config> resolve(RunOptions& o) {
  RETURN_IF_ERROR(check(o));
  if (o.ep_size == 0) o.ep_size = 1;
  ASSIGN_OR_RETURN(model::Config config, model::load_config(o.model));
  RETURN_IF_ERROR(parse_mode(o.deepep_mode).status());
  ASSIGN_OR_RETURN(const Device device, choose_device(o.device));
  if (device.gpu != nullptr && (o.ep_size != 1 || o.a2a_backend == "ucx" || !o.calibrate.empty())) {
    return Status::usage(
        "--device cuda runs on one GPU so far: take --ep-size 1 and the local exchange, and "
        "calibrate with sortie quantize on the CPU");
  }
  if (device.gpu != nullptr && o.kv_cache_dtype == "fp32") {
    return Status::usage("--kv-cache-dtype fp32: a GPU's latents are bf16; leave it out");
  }
  if (o.kv_cache_dtype == "auto") o.kv_cache_dtype = device.gpu != nullptr ? "bf16" : "fp32";
  if (o.a2a_backend == "deepep" || o.a2a_backend == "auto") o.a2a_backend = "local";
  if (o.a2a_backend != "local" && o.a2a_backend != "ucx") {
    return Status::usage(fmt::format(
        "--moe-a2a-backend {} is unknown here: take auto, local or ucx", o.a2a_backend));
  }
  if ((o.ep_size & (o.ep_size - 1)) != 0 || config.n_routed_experts % o.ep_size != 0) {
    return Status::usage(fmt::format(
        "--ep-size {} does not fit: it must be a power of two that divides the model's {} experts",
        o.ep_size, config.n_routed_experts));
  }
  if (o.context_length == 0) {
    o.context_length = std::min<int64_t>(config.max_position_embeddings, 8192);
  }
  // With --mem-fraction-static plan_memory sizes the cache, once all ranks are there.
  if (o.max_total_tokens == 0 && o.mem_fraction_static == 0) {
    o.max_total_tokens = std::min<int64_t>(o.max_running_requests * o.context_length,
                                           std::max<int64_t>(o.context_length, 32768));
  }
  // Follows from the flag alone, so that answers do not depend on the load (docs/numerics.md).
  if (o.decode_segment == 0) o.decode_segment = o.max_running_requests <= 4 ? 256 : 1024;
  if (o.max_dispatch_tokens == 0) {
    o.max_dispatch_tokens = o.max_running_requests;
    if (o.deepep_mode == "low_latency") o.max_dispatch_tokens += o.chunked_prefill_size;
  }
  if (o.threads == 0) o.threads = std::max(1, available_cpus() / o.ep_size);
  return config;
}

quant::Format cache_format(const RunOptions& options) {
  return options.kv_cache_dtype == "bf16" ? quant::Format::kBf16 : quant::Format::kF32;
}

model::Formats formats_of(const model::Config& config, const RunOptions& options) {
  using quant::Format;
  const Format cache = cache_format(options);
  // A w4afp8 file's other linears are fp8_block (or bf16, which its tensors alone would tell).
  const bool dense_fp8 = options.dense == "fp8_block" || config.dialect == Dialect::kW4Afp8;
  switch (quantization_of(config, options)) {
    case Quantization::kW4Afp8:
      return {Format::kW4Afp8, dense_fp8 ? Format::kFp8Block : Format::kBf16, cache};
    case Quantization::kW8A8Int8:
      return {Format::kW8A8Int8, Format::kW8A8Int8, cache};
    case Quantization::kFp8Block:
      return {Format::kFp8Block, Format::kFp8Block, cache};
    case Quantization::kNone:
      break;
  }
  return {.cache = cache};
}

namespace {

// Where the ranks run; also what that decides about the flags.
Result<exchange::LaunchPlan> plan_ranks(RunOptions& o) {
  ASSIGN_OR_RETURN(const exchange::LaunchPlan plan,
                   exchange::plan_launch({.ep_size = o.ep_size,
                                          .dist_init_addr = o.dist_init_addr,
                                          .nnodes = o.nnodes,
                                          .node_rank = o.node_rank},
                                         exchange::process_environment()));
  o.ep_size = plan.size;
  if (!plan.meets()) return plan;
  if (o.a2a_backend == "local") {
    return Status::usage(
        "--moe-a2a-backend local is for ranks that are threads of one process: leave it out where "
        "a launcher or --nnodes starts several");
  }
  if (o.a2a_backend == "auto" || o.a2a_backend == "deepep") o.a2a_backend = "ucx";
  return plan;
}

Result<std::string> fingerprint(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, read_text_file(path, model::kMaxConfigBytes));
  return fmt::format("{:016x}", hash_bytes(std::as_bytes(std::span(text))));
}

// What all ranks must have in common for a step to make sense, in words for a sentence.
Result<std::vector<std::string>> settings_of(const RunOptions& o) {
  ASSIGN_OR_RETURN(const std::string config, fingerprint(o.model + "/config.json"));
  return std::vector<std::string>{
      "a model whose config.json has fingerprint " + config,
      "--device " + o.device,
      "--quantization " + (o.quantization.empty() ? "(none)" : o.quantization),
      "--dense " + (o.dense.empty() ? "(none)" : o.dense),
      "--kv-cache-dtype " + o.kv_cache_dtype,
      "--deepep-mode " + o.deepep_mode,
      fmt::format("--max-running-requests {}", o.max_running_requests),
      fmt::format("--chunked-prefill-size {}", o.chunked_prefill_size),
      fmt::format("--max-dispatch-tokens {}", o.max_dispatch_tokens),
      fmt::format("--context-length {}", o.context_length),
      fmt::format("--decode-segment {}", o.decode_segment),
      "--on-rank-loss " + o.on_rank_loss};
}

}  // namespace

Result<std::unique_ptr<Ranks>> Ranks::open(RunOptions options, const Launch& launch) {
  auto ranks = std::make_unique<Ranks>();
  ranks->options_ = std::move(options);
  const int threads = ranks->options_.threads;
  ASSIGN_OR_RETURN(const exchange::LaunchPlan plan, plan_ranks(ranks->options_));
  ASSIGN_OR_RETURN(ranks->config_, resolve(ranks->options_));
  ranks->ranks_.resize(ranks->options_.a2a_backend == "ucx" ? 1
                                                            : static_cast<size_t>(ranks->size()));
  RETURN_IF_ERROR(ranks->connect(plan, launch));
  RETURN_IF_ERROR(ranks->share_cpus());
  if (threads == 0) {
    ranks->options_.threads = std::max(1, available_cpus() / ranks->cpu_sharers_);
  }
  // A GPU's memory is its own: nothing is known of it here, and the host's says little.
  ASSIGN_OR_RETURN(const Device device, choose_device(ranks->options_.device));
  if (device.gpu == nullptr) {
    ASSIGN_OR_RETURN(const HostLoad load,
                     plan_memory(ranks->config_, ranks->options_,
                                 ranks->processes_ ? &ranks->processes_->control() : nullptr));
    ranks->plan_.emplace_back(
        "memory", fmt::format("{:.2f} GiB planned: {}",
                              static_cast<double>(load.needs.total()) / 0x1p30, parts(load.needs)));
  } else if (ranks->options_.max_total_tokens == 0) {
    return Status::usage("--mem-fraction-static is for --device cpu: name --max-total-tokens");
  }
  RETURN_IF_ERROR(ranks->load());
  RETURN_IF_ERROR(ranks->build());
  return ranks;
}

Ranks::~Ranks() = default;

Status Ranks::connect(const exchange::LaunchPlan& plan, const Launch& launch) {
  if (options_.a2a_backend == "local") return Status::ok();
#if SORTIE_HAS_UCX
  ASSIGN_OR_RETURN(const std::vector<std::string> settings, settings_of(options_));
  ASSIGN_OR_RETURN(processes_,
                   exchange::ProcessGroup::open(plan, launch.child, launch.argc, launch.argv,
                                                {.dist_timeout = seconds(options_.dist_timeout),
                                                 .cluster_key_file = options_.cluster_key_file,
                                                 .insecure = options_.insecure,
                                                 .settings = settings}));
  first_rank_ = processes_->rank();
  // The exchange's own deadline speaks first; then nothing waits for the silent any more.
  processes_->control().give_up_after(seconds(options_.exchange_timeout + 2));
  return Status::ok();
#else
  (void)plan;
  (void)launch;
  return Status::usage("--moe-a2a-backend ucx is not in this build (SORTIE_UCX=OFF): take local");
#endif
}

// A launcher may have given each rank CPUs of its own, or all of a host the same: who may use the
// same CPUs shares them.
Status Ranks::share_cpus() {
  cpu_sharers_ = size();
  if (!processes_) return Status::ok();
  std::string mine = boot_id();
  for (const int cpu : allowed_cpus()) mine += fmt::format(" {}", cpu);
  ASSIGN_OR_RETURN(const auto all,
                   processes_->control().all_gather(std::as_bytes(std::span<const char>(mine)),
                                                    seconds(options_.dist_timeout)));
  const exchange::Bytes& own = all[static_cast<size_t>(first_rank_)];
  cpu_sharers_ = static_cast<int>(std::count(all.begin(), all.end(), own));
  cpu_share_ = static_cast<int>(std::count(all.begin(), all.begin() + first_rank_, own));
  return Status::ok();
}

Result<std::vector<std::shared_ptr<exchange::Transport>>> Ranks::transports(int64_t window_bytes) {
#if SORTIE_HAS_UCX
  if (processes_) {
    ASSIGN_OR_RETURN(auto transport,
                     exchange::make_ucx_transport(processes_->shared_control(),
                                                  {.window_bytes = window_bytes,
                                                   .dist_timeout = seconds(options_.dist_timeout),
                                                   .network_address = processes_->address()}));
    for (int peer = 0; peer < transport->size(); ++peer) {
      if (peer != transport->rank()) {
        spdlog::info("rank {} to rank {}: {}", transport->rank(), peer, transport->lane(peer));
      }
    }
    return std::vector<std::shared_ptr<exchange::Transport>>{std::move(transport)};
  }
#endif
  return exchange::make_local_group(options_.ep_size, window_bytes);
}

Status Ranks::load() {
  ASSIGN_OR_RETURN(model::LoadOptions load, load_options(options_));
  if (!options_.calibrate.empty()) {
    ASSIGN_OR_RETURN(load.activation_scales, calibrated_scales(options_));
  }
  const int only = ranks_.size() == 1 ? first_rank_ : -1;
  ASSIGN_OR_RETURN(weights_, model::load_weights(options_.model, config_, load, only));
  CHECK(weights_.size() == ranks_.size());
  int64_t experts = 0;
  for (const auto& w : weights_) experts += matrix_bytes_of(*w).first;
  const int64_t rest = matrix_bytes_of(*weights_[0]).second;
  weight_bytes_ = experts + rest;
  plan_.emplace_back("weights",
                     fmt::format("{} of experts, {} of the rest", mib(experts), mib(rest)));
  return Status::ok();
}

Status Ranks::build() {
  const RunOptions& o = options_;
  ASSIGN_OR_RETURN(const Device device, choose_device(o.device));
  exchange::Options exchange = exchange_options(config_, o);
  exchange.spin = o.threads * cpu_sharers_ <= available_cpus();
  ASSIGN_OR_RETURN(const auto group, transports(exchange.window_bytes(o.ep_size)));
  const model::ModelOptions model_options{
      .page_size = o.page_size,
      .pages = static_cast<int32_t>(quant::ceil_div(o.max_total_tokens, o.page_size)),
      .cache_format = cache_format(o),
      .decode_segment = o.decode_segment,
      .context_length = o.context_length,
      .mtp = o.mtp};
  const std::vector<RankPlace> places = place_on_host(cpu_sharers_, o.threads);
  const bool pin = !places[0].cpus.empty();
  const bool several_nodes = numa_nodes().size() > 1;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    Rank& rank = ranks_[i];
    rank.index = first_rank_ + static_cast<int>(i);
    const RankPlace& place = places[static_cast<size_t>(cpu_share_) + i];
    rank.threads = std::make_unique<ThreadPool>(o.threads, place.cpus, exchange.spin);
    if (device.gpu != nullptr) {
      RETURN_IF_ERROR(build_on_gpu(rank, *device.gpu, exchange, model_options));
      continue;
    }
    if (place.node >= 0 && several_nodes) {
      prefer_node(group[i]->window(), static_cast<size_t>(group[i]->window_bytes()), place.node);
      move_weights(*weights_[i], place.node, ranks_.size() == 1);
    }
    rank.exchange = exchange::make_exchange(group[i], exchange);
    rank.model = model::make_model(config_, weights_[i], *device.host, *rank.threads,
                                   *rank.exchange, model_options);
  }
  if (!o.profile.empty()) {
    for (const Rank& rank : ranks_) rank.model->laps().record();
  }
  plan_.emplace_back("backend", fmt::format("{}, {} thread{} a rank{}", device.name, o.threads,
                                            o.threads == 1 ? "" : "s", pin ? ", pinned" : ""));
  plan_.emplace_back(
      "experts", fmt::format("{} over {} rank{} ({}), exchange {}", config_.n_routed_experts,
                             o.ep_size, o.ep_size == 1 ? "" : "s", o.a2a_backend, o.deepep_mode));
  plan_.emplace_back(
      "cache", fmt::format("{} tokens a rank, {}, in pages of {}, decode segment {}",
                           o.max_total_tokens, o.kv_cache_dtype, o.page_size, o.decode_segment));
  return Status::ok();
}

// The one rank's model and exchange on the GPU; the weights move there, the host's copy is dropped.
Status Ranks::build_on_gpu(Rank& rank, const ops::BackendOf<bf16>& backend,
                           const exchange::Options& exchange_options,
                           const model::ModelOptions& model_options) {
#if SORTIE_HAS_CUDA
  void* stream = backend.device->stream();
  ASSIGN_OR_RETURN(weights_[0], model::upload(*weights_[0], config_, *backend.device, stream));
  rank.exchange = exchange::make_gpu_exchange(exchange_options, stream);
  rank.model = model::make_model(config_, weights_[0], backend, stream, *rank.threads,
                                 *rank.exchange, model_options);
#else
  (void)rank, (void)backend, (void)exchange_options, (void)model_options;
#endif
  return Status::ok();
}

Status Ranks::on_each(const std::function<Status(Rank&)>& fn) {
  std::vector<Status> results(ranks_.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    threads.emplace_back([&, i] {
      ranks_[i].threads->pin_caller();
      results[i] = fn(ranks_[i]);
      // The others would wait for a rank that has given up.
      if (!results[i].is_ok()) {
        for (Rank& r : ranks_) r.exchange->abort();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  const Status* first = nullptr;
  for (const Status& s : results) {
    if (s.is_ok()) continue;
    if (first == nullptr || first->code() == StatusCode::kCancelled) first = &s;
  }
  return first == nullptr ? Status::ok() : *first;
}

}  // namespace sortie::cli
