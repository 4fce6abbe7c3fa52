#include "cli/memory_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "base/host.h"
#include "base/json.h"
#include "base/saturate.h"

namespace sortie::cli {

namespace {

using model::Dialect;
using model::Formats;
using quant::Format;

std::string gib(int64_t bytes) {
  const double gib = static_cast<double>(bytes) / 0x1p30;
  return gib < 0.1 ? fmt::format("{:.4f}", gib) : fmt::format("{:.1f}", gib);
}

int64_t whole_pages(int64_t tokens, int64_t page) { return tokens / page * page; }

// What a rank's process says about its host.
struct HostReport {
  std::array<char, 64> boot{};  // the same on all ranks of a host, and on no other
  std::array<char, 64> name{};
  std::array<char, 128> limit{};
  int64_t free = 0;
};

template <size_t n>
void copy_text(const std::string& text, std::array<char, n>& out) {
  text.copy(out.data(), n - 1);
}

HostReport report_of_this_host() {
  HostReport report;
  const FreeMemory free = free_memory();
  copy_text(boot_id(), report.boot);
  copy_text(host_name(), report.name);
  copy_text(free.limit, report.limit);
  report.free = free.bytes;
  return report;
}

// By rank. A message of another size is another build's.
Result<std::vector<HostReport>> gather_reports(const HostReport& mine, exchange::Control& control,
                                               double timeout) {
  ASSIGN_OR_RETURN(const auto blobs,
                   control.all_gather(std::as_bytes(std::span(&mine, 1)), seconds(timeout)));
  std::vector<HostReport> reports(blobs.size());
  for (size_t r = 0; r < blobs.size(); ++r) {
    if (blobs[r].size() != sizeof(HostReport)) {
      return Status::invalid(fmt::format("rank {} runs another build of sortie", r));
    }
    std::memcpy(&reports[r], blobs[r].data(), sizeof(HostReport));
    reports[r].boot.back() = reports[r].name.back() = reports[r].limit.back() = 0;
  }
  return reports;
}

// One host of the group, with the least that any of its ranks found free.
struct Host {
  HostReport report;
  int ranks = 0;
};

std::vector<Host> hosts_of(const std::vector<HostReport>& reports) {
  std::vector<Host> hosts;
  for (const HostReport& r : reports) {
    auto it = std::find_if(hosts.begin(), hosts.end(),
                           [&](const Host& h) { return h.report.boot == r.boot; });
    if (it == hosts.end()) it = hosts.insert(it, {r, 0});
    if (r.free < it->report.free) it->report = r;
    ++it->ranks;
  }
  return hosts;
}

model::WeightBytes by_config(const model::Config& config, const Formats& formats) {
  const model::MemoryPlan plan = model::memory_plan(config, formats);
  return {.experts = {.made = plan.expert_bytes}, .rest = {.mapped = plan.dense_bytes}};
}

}  // namespace

std::string parts(const HostNeeds& n) {
  return fmt::format("weights {}, cache {}, exchange {}, scratch {}", gib(n.weights), gib(n.cache),
                     gib(n.exchange), gib(n.scratch));
}

int64_t HostNeeds::total() const {
  return saturating_add(saturating_add(weights, cache), saturating_add(exchange, scratch));
}

exchange::Options exchange_options(const model::Config& config, const RunOptions& o) {
  const auto mode = parse_mode(o.deepep_mode);
  return {
      .experts = std::max(config.n_routed_experts, o.ep_size),
      .topk = std::max(config.num_experts_per_tok, 1),
      .hidden = config.hidden_size,
      // fp32 rows are the widest of all wire formats, and an unquantised layer has them.
      .widest_row_bytes = quant::act_row_bytes(quant::ActFormat::kF32, config.hidden_size),
      .max_dispatch_tokens = o.max_dispatch_tokens,
      .max_normal_tokens = o.chunked_prefill_size + o.max_running_requests,
      .mode = mode.is_ok() ? *mode : exchange::Mode::kAuto,
      .on_loss = o.on_rank_loss == "degrade" ? exchange::OnLoss::kDegrade : exchange::OnLoss::kFail,
      .exchange_timeout = seconds(o.exchange_timeout),
      .step_timeout = seconds(o.step_timeout)};
}

model::RankLoad rank_load(const model::Config& config, const RunOptions& o) {
  const int64_t page = o.page_size;
  return {.cache_tokens = saturating_product(quant::ceil_div(o.max_total_tokens, page), page),
          .cache_layers = config.num_hidden_layers + (o.mtp ? config.num_nextn_predict_layers : 0),
          .cache_format = cache_format(o),
          .context_length = o.context_length,
          .step_rows = o.chunked_prefill_size + o.max_running_requests,
          .decode_rows = o.max_running_requests,
          .decode_segment = std::max<int64_t>(1, o.decode_segment)};
}

HostLoad host_load(const model::Config& config, const RunOptions& o,
                   const model::WeightBytes& weights, int ranks) {
  HostLoad load{.ranks = ranks, .processes = o.a2a_backend == "ucx" ? ranks : 1};
  const int64_t experts = saturating_add(weights.experts.mapped, weights.experts.made);
  load.needs.weights =
      saturating_add(saturating_add(experts / o.ep_size * ranks, weights.rest.mapped),
                     saturating_product(weights.rest.made, load.processes));
  const model::RankLoad each = rank_load(config, o);
  model::RankLoad one = each;
  one.cache_tokens = 1;
  load.cache_token = model::cache_bytes(config, one);
  load.needs.cache = saturating_product(model::cache_bytes(config, each), ranks);
  load.needs.scratch = saturating_product(model::scratch_bytes(config, each), ranks);
  const exchange::Options x = exchange_options(config, o);
  load.needs.exchange =
      saturating_product(x.window_bytes(o.ep_size) + x.parts_bytes(o.ep_size), ranks);
  return load;
}

Result<int64_t> tokens_by_fraction(const RunOptions& o, const HostLoad& load, int64_t free) {
  const double share =
      o.mem_fraction_static * static_cast<double>(free) - static_cast<double>(load.needs.weights);
  const double a_token = static_cast<double>(load.cache_token) * load.ranks;
  const int64_t most = saturating_product(o.max_running_requests, o.context_length);
  const auto tokens = static_cast<int64_t>(
      std::clamp(share / a_token, 0.0, static_cast<double>(std::min(most, int64_t{1} << 52))));
  // The running requests may share a last page each.
  const int64_t whole = whole_pages(tokens, o.page_size);
  if (whole > 0) return whole;
  return Status::exhausted(fmt::format(
      "--mem-fraction-static {}: of {} GiB free the weights take {} and leave no page of cache; "
      "raise it, or name --max-total-tokens",
      o.mem_fraction_static, gib(free), gib(load.needs.weights)));
}

Status check_fits(const std::string& model, const RunOptions& o, const HostLoad& load,
                  const FreeMemory& free, std::span<const OtherForm> others) {
  const HostNeeds& n = load.needs;
  if (n.total() <= free.bytes) return Status::ok();
  std::string text = fmt::format("{} needs {} GiB, {} are free ({}): {}", model, gib(n.total()),
                                 gib(free.bytes), free.limit, parts(n));
  bool advised = false;
  const auto advise = [&](const std::string& what) {
    text += (advised ? ", or " : "; ") + what;
    advised = true;
  };
  const int64_t without_cache = saturating_add(n.weights, saturating_add(n.exchange, n.scratch));
  if (without_cache < free.bytes && n.cache < std::numeric_limits<int64_t>::max()) {
    const int64_t tokens = whole_pages(
        (free.bytes - without_cache) / std::max<int64_t>(1, load.cache_token * load.ranks),
        o.page_size);
    if (tokens > 0) advise(fmt::format("--max-total-tokens {} would fit", tokens));
  } else if (saturating_add(n.weights, load.cache_token * load.ranks * o.page_size) < free.bytes) {
    advise(
        "a smaller --chunked-prefill-size, --max-running-requests or --context-length would "
        "need less for exchange and scratch");
  }
  for (const OtherForm& form : others) {
    const int64_t total = saturating_add(form.bytes, n.total() - n.weights);
    if (total > free.bytes) continue;
    advise(fmt::format("{} would need {} ({})", form.name, gib(total), form.how));
  }
  if (!advised) advise("no form of it fits here: take more hosts or a smaller model");
  return Status::exhausted(std::move(text));
}

std::vector<OtherForm> other_forms(const model::Config& config, const RunOptions& o, int ranks) {
  struct Form {
    const char* name;
    const char* flags;
    Formats formats;
  };
  const Form forms[] = {
      {"fp8_block", "fp8_block", {Format::kFp8Block, Format::kFp8Block}},
      {"w8a8_int8", "w8a8_int8", {Format::kW8A8Int8, Format::kW8A8Int8}},
      {"w4afp8", "w4afp8", {Format::kW4Afp8, Format::kBf16}},
      {"w4afp8 with fp8_block", "w4afp8 --dense fp8_block", {Format::kW4Afp8, Format::kFp8Block}}};
  const bool while_loading = config.dialect == Dialect::kBf16;
  // Only bf16 and fp8_block checkpoints can be quantised further.
  if (!while_loading && config.dialect != Dialect::kFp8Block) return {};
  std::vector<OtherForm> others;
  for (const Form& form : forms) {
    if (!while_loading && form.formats.experts == Format::kFp8Block) continue;
    const HostLoad load = host_load(config, o, by_config(config, form.formats), ranks);
    others.push_back({form.name,
                      while_loading ? fmt::format("--quantization {}", form.flags)
                                    : fmt::format("sortie quantize --format {}", form.flags),
                      load.needs.weights});
  }
  return others;
}

Result<model::WeightBytes> planned_weights(const model::Config& config, const RunOptions& o) {
  if (!file_exists(o.model + "/model.safetensors") &&
      !file_exists(o.model + "/model.safetensors.index.json")) {
    return by_config(config, formats_of(config, o));
  }
  ASSIGN_OR_RETURN(const model::LoadOptions load, load_options(o));
  return model::weight_bytes(o.model, config, load);
}

Result<HostLoad> plan_memory(const model::Config& config, RunOptions& o,
                             exchange::Control* control) {
  RETURN_IF_ERROR(exchange::check_options(exchange_options(config, o), o.ep_size));
  const HostReport here = report_of_this_host();
  std::vector<Host> hosts = {{here, o.ep_size}};
  if (control != nullptr) {
    ASSIGN_OR_RETURN(const auto reports, gather_reports(here, *control, o.dist_timeout));
    hosts = hosts_of(reports);
  }
  ASSIGN_OR_RETURN(const model::WeightBytes weights, planned_weights(config, o));
  if (o.max_total_tokens == 0) {
    int64_t tokens = std::numeric_limits<int64_t>::max();
    for (const Host& host : hosts) {
      ASSIGN_OR_RETURN(
          const int64_t fit,
          tokens_by_fraction(o, host_load(config, o, weights, host.ranks), host.report.free));
      tokens = std::min(tokens, fit);
    }
    o.max_total_tokens = tokens;
  }
  for (const Host& host : hosts) {
    const HostLoad load = host_load(config, o, weights, host.ranks);
    const std::string where =
        hosts.size() == 1 ? o.model : fmt::format("{} on {}", o.model, host.report.name.data());
    RETURN_IF_ERROR(check_fits(where, o, load, {host.report.free, host.report.limit.data()},
                               other_forms(config, o, host.ranks)));
  }
  const auto own = std::find_if(hosts.begin(), hosts.end(),
                                [&](const Host& h) { return h.report.boot == here.boot; });
  CHECK(own != hosts.end(), "this host is one of the group's");
  return host_load(config, o, weights, own->ranks);
}

}  // namespace sortie::cli
