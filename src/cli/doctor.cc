#include "cli/doctor.h"

#include <fmt/format.h>

#include <fstream>

#include "backends/cpu/isa.h"
#include "base/memory.h"
#include "cli/bandwidth.h"
#include "cli/memory_check.h"
#include "cli/placement.h"
#include "model/plan.h"

namespace sortie::cli {

namespace {

void line(std::string_view name, const std::string& text) { fmt::print("{:<18} {}\n", name, text); }

std::string gib(double bytes) { return fmt::format("{:.2f} GiB", bytes / (1024.0 * 1024 * 1024)); }

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string text; std::getline(file, text);) {
    if (text.starts_with("model name")) return text.substr(text.find(':') + 2);
  }
  return "unknown processor";
}

void machine(cpu::Isa isa, double read_gbs, int threads) {
  line("processor", fmt::format("{}, {} usable here", cpu_name(), available_cpus()));
  line("instruction set", cpu::isa_reason(isa));
  for (const cpu::Isa each : cpu::all_isas())
    line(fmt::format("  {}", cpu::isa_name(each)), cpu::isa_note(each));
  const FreeMemory free = free_memory();
  line("memory", fmt::format("{} free ({})", gib(static_cast<double>(free.bytes)), free.limit));
  line("memory nodes", describe_nodes(numa_nodes()));
  line("huge pages", huge_pages());
  line("/dev/shm", fmt::format("{} free, for windows of ranks that are processes",
                               gib(static_cast<double>(free_shared_memory()))));
  line("read bandwidth", fmt::format("{:.1f} GB/s measured with {} thread{}", read_gbs, threads,
                                     threads == 1 ? "" : "s"));
  line("ucx", SORTIE_HAS_UCX ? "built in: ranks can be processes (--moe-a2a-backend ucx)"
                             : "not built in: ranks are threads");
}

void memory(const model::Config& config, const RunOptions& o, int64_t beside_weights,
            double read_gbs) {
  struct Row {
    const char* name;
    model::Formats formats;
  };
  using quant::Format;
  const Row rows[] = {{"bf16", {Format::kBf16, Format::kBf16}},
                      {"fp8_block", {Format::kFp8Block, Format::kFp8Block}},
                      {"w8a8_int8", {Format::kW8A8Int8, Format::kW8A8Int8}},
                      {"w4afp8", {Format::kW4Afp8, Format::kBf16}},
                      {"w4afp8 + fp8_block", {Format::kW4Afp8, Format::kFp8Block}}};
  const std::string chosen =
      quantization_name(config, o) + (o.dense.empty() ? "" : " + " + o.dense);
  const auto available = static_cast<double>(free_memory().bytes);
  fmt::print("\n{:<20} {:>12} {:>12} {:>12} {:>16} {:>18}\n", "form", "experts", "rest",
             "MiB a token", "bound, tokens/s", "fits");
  for (const Row& row : rows) {
    const model::MemoryPlan plan = model::memory_plan(config, row.formats);
    const double total = static_cast<double>(plan.expert_bytes) +
                         static_cast<double>(plan.dense_bytes) +
                         static_cast<double>(beside_weights);
    fmt::print(
        "{:<20} {:>12} {:>12} {:>12.1f} {:>16.1f} {:>18}{}\n", row.name,
        gib(static_cast<double>(plan.expert_bytes)), gib(static_cast<double>(plan.dense_bytes)),
        static_cast<double>(plan.bytes_per_token) / 1048576.0,
        read_gbs * 1e9 / static_cast<double>(plan.bytes_per_token),
        total < available ? "yes" : "needs " + gib(total), chosen == row.name ? "  <- this" : "");
  }
}

}  // namespace

Status doctor(const RunOptions& options) {
  ASSIGN_OR_RETURN(const cpu::Isa isa, cpu::choose_isa());
  const int threads = options.threads > 0 ? options.threads : available_cpus();
  const double read_gbs = measure_read_bandwidth(threads);
  machine(isa, read_gbs, threads);
  if (options.model.empty()) return Status::ok();

  RunOptions o = options;
  ASSIGN_OR_RETURN(const model::Config config, resolve(o));
  const model::MemoryPlan plan = model::memory_plan(config, formats_of(config, o));
  line("model",
       fmt::format("{}: {} layers, hidden {}, {} experts, top-{}, vocabulary {}", config.model_type,
                   config.num_hidden_layers, config.hidden_size, config.n_routed_experts,
                   config.num_experts_per_tok, config.vocab_size));
  line("parameters",
       fmt::format("{:.2f} M, {:.2f} M active a token", static_cast<double>(plan.parameters) * 1e-6,
                   static_cast<double>(plan.active_parameters) * 1e-6));
  line("stored as", quantization_name(config, {}));
  line("ranks", fmt::format("{} of {} thread{}, {} experts each, exchange {} {}", o.ep_size,
                            o.threads, o.threads == 1 ? "" : "s",
                            config.n_routed_experts / o.ep_size, o.a2a_backend, o.deepep_mode));
  line("placement", describe(place_on_host(o.ep_size, o.threads)));
  ASSIGN_OR_RETURN(const model::WeightBytes weights, planned_weights(config, o));
  if (o.max_total_tokens == 0) {
    ASSIGN_OR_RETURN(
        o.max_total_tokens,
        tokens_by_fraction(o, host_load(config, o, weights, o.ep_size), free_memory().bytes));
  }
  const HostLoad load = host_load(config, o, weights, o.ep_size);
  line("latent cache",
       fmt::format("{} tokens a rank in pages of {}: {}", o.max_total_tokens, o.page_size,
                   gib(static_cast<double>(plan.cache_bytes_per_token * o.max_total_tokens))));
  line("memory plan", fmt::format("{} on this host: {} GiB",
                                  gib(static_cast<double>(load.needs.total())), parts(load.needs)));
  line("decode segment", fmt::format("{} keys (--decode-segment)", o.decode_segment));
  if (o.ep_size > kCombineLeaves) {
    line("note",
         "more than 8 ranks: the combine tree differs, answers may differ from ep-size <= 8");
  }
  memory(config, o, load.needs.total() - load.needs.weights, read_gbs);
  return check_fits(o.model, o, load, free_memory(), other_forms(config, o, o.ep_size));
}

}  // namespace sortie::cli
