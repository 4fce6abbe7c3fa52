#include "cli/bench_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "backends/cpu/isa.h"
#include "backends/cpu/probe.h"
#include "cli/bandwidth.h"
#include "cli/sequence.h"
#include "cli/shapes.h"
#include "exchange/local.h"
#include "model/model.h"
#include "model/plan.h"
#include "model/random_checkpoint.h"

namespace sortie::cli {

namespace {

using model::StepTimes;

// One rank of the bench, all in this process.
struct BenchRank {
  std::unique_ptr<ThreadPool> threads;
  std::unique_ptr<exchange::Exchange> exchange;
  std::unique_ptr<model::Model> model;
  std::vector<Sequence> sequences;
};

class Bench {
 public:
  static constexpr int64_t kPage = 64;

  Status open(const BenchModelOptions& o) {
    options_ = o;
    ASSIGN_OR_RETURN(form_, bench_form(o.format));
    if (o.kv_cache_dtype == "bf16") form_.formats.cache = quant::Format::kBf16;
    ASSIGN_OR_RETURN(config_, bench_shape(o.shape));
    if (o.layers > 0) config_.num_hidden_layers = std::min(config_.num_hidden_layers, o.layers);
    if (o.ep_size < 1 || config_.n_routed_experts % o.ep_size != 0) {
      return Status::usage(fmt::format("--ep-size {} does not divide {} experts", o.ep_size,
                                       config_.n_routed_experts));
    }
    threads_ = o.threads > 0 ? o.threads : std::max(1, available_cpus() / o.ep_size);
    const int batch = *std::max_element(o.batch.begin(), o.batch.end());
    const int depth = *std::max_element(o.depth.begin(), o.depth.end());
    context_ = std::max(depth + o.steps + 8, o.prefill);
    ASSIGN_OR_RETURN(isa_, cpu::choose_isa());
    const exchange::Options exchange_options{
        .experts = config_.n_routed_experts,
        .topk = config_.num_experts_per_tok,
        .hidden = config_.hidden_size,
        .widest_row_bytes = quant::act_row_bytes(quant::ActFormat::kF32, config_.hidden_size),
        .max_dispatch_tokens = batch,
        .max_normal_tokens = std::max(batch, o.prefill),
        .spin = threads_ * o.ep_size <= available_cpus()};
    RETURN_IF_ERROR(exchange::check_options(exchange_options, o.ep_size));
    auto group = exchange::make_local_group(o.ep_size, exchange_options.window_bytes(o.ep_size));
    const auto pages = static_cast<int32_t>(Sequence::pages(context_, kPage)) * batch;
    for (int r = 0; r < o.ep_size; ++r) {
      ASSIGN_OR_RETURN(auto weights, model::random_weights(config_, form_.dialect, r, o.ep_size, 1,
                                                           &cpu::backend(isa_)));
      BenchRank& rank = ranks_.emplace_back();
      rank.threads =
          std::make_unique<ThreadPool>(threads_, std::vector<int>{}, exchange_options.spin);
      rank.exchange = exchange::make_exchange(group[static_cast<size_t>(r)], exchange_options);
      rank.model = model::make_model(config_, std::move(weights), cpu::backend(isa_), *rank.threads,
                                     *rank.exchange,
                                     model::ModelOptions{.page_size = kPage,
                                                         .pages = pages,
                                                         .cache_format = form_.formats.cache,
                                                         .decode_segment = 1024,
                                                         .context_length = context_});
      rank.model->fill_cache();
    }
    return Status::ok();
  }

  // One step on every rank: `rows` tokens each, as decode rows of as many requests at `depth`, or
  // as one prompt. Returns the seconds of the slowest rank.
  Result<double> step(int rows, int depth, bool prefill) {
    std::vector<Status> results(ranks_.size());
    std::vector<std::thread> threads;
    const TimePoint start = Clock::now();
    for (size_t r = 0; r < ranks_.size(); ++r) {
      threads.emplace_back([&, r] { results[r] = run(ranks_[r], rows, depth, prefill).status(); });
    }
    for (std::thread& t : threads) t.join();
    for (const Status& s : results) RETURN_IF_ERROR(s);
    ++count_;
    return to_seconds(Clock::now() - start);
  }

  StepTimes take_times() {
    const StepTimes times = ranks_[0].model->times();
    for (BenchRank& r : ranks_) r.model->times().clear();
    return times;
  }
  int threads() const { return threads_; }
  double peak_gops() const {
    ThreadPool pool(threads_ * options_.ep_size);
    return cpu::peak_gops(isa_, pool, cpu::arithmetic_of(form_.formats.experts, isa_), 0.1);
  }
  int moe_layers() const {
    int n = 0;
    for (int i = 0; i < config_.num_hidden_layers; ++i) n += config_.is_moe_layer(i) ? 1 : 0;
    return n;
  }
  const model::Config& config() const { return config_; }
  model::MemoryPlan plan() const { return model::memory_plan(config_, form_.formats); }

 private:
  Result<model::Model::Output> run(BenchRank& rank, int rows, int depth, bool prefill) {
    model::Step step;
    std::vector<Sequence> sequences;
    std::vector<int32_t> ids(static_cast<size_t>(rows));
    for (size_t i = 0; i < ids.size(); ++i) {
      // Other tokens each step, so that other experts are hit.
      ids[i] = static_cast<int32_t>((count_ * 7919 + static_cast<int64_t>(i) * 104729 + 13) %
                                    config_.vocab_size);
    }
    const auto pages = static_cast<int32_t>(Sequence::pages(context_, kPage));
    for (int i = 0; i < (prefill ? 1 : rows); ++i) {
      sequences.emplace_back(i * pages, context_, kPage);
      sequences.back().skip(depth);
    }
    for (size_t i = 0; i < sequences.size(); ++i) {
      sequences[i].append(step,
                          prefill ? std::span<const int32_t>(ids) : std::span(ids).subspan(i, 1),
                          prefill, false);
    }
    return rank.model->forward(step);
  }

  BenchModelOptions options_;
  BenchForm form_;
  cpu::Isa isa_ = cpu::Isa::kGeneric;
  model::Config config_;
  int threads_ = 1;
  int64_t context_ = 0;
  int64_t count_ = 0;
  std::vector<BenchRank> ranks_;
};

double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + static_cast<int64_t>(v.size() / 2), v.end());
  return v[v.size() / 2];
}

// The parts of a step in ms (or us a layer), by rank 0.
std::string parts(const StepTimes& times, double scale) {
  std::string text;
  for (int p = 0; p < StepTimes::kParts; ++p) {
    text += fmt::format(" {} {:.2f}", StepTimes::name(static_cast<StepTimes::Part>(p)),
                        times.seconds[static_cast<size_t>(p)] * scale /
                            static_cast<double>(std::max<int64_t>(1, times.steps)));
  }
  return text;
}

// Median and best of what was sampled.
struct Samples {
  double median = 0;
  double best = 0;
};
Samples samples_of(const std::vector<double>& v, bool lowest_is_best) {
  return {median(v), lowest_is_best ? *std::min_element(v.begin(), v.end())
                                    : *std::max_element(v.begin(), v.end())};
}

struct Timed {
  Samples seconds;
  Samples read_gbs;
  Samples peak_gops;  // of the instruction that the experts' products come from
  StepTimes times;
};

// Steps take turns with tests of the machine: its memory and its neighbours change their pace.
Result<Timed> measure(Bench& bench, int rows, int depth, bool prefill, int steps, int ranks) {
  RETURN_IF_ERROR(bench.step(rows, depth, prefill).status());
  (void)bench.take_times();
  std::vector<double> seconds;
  std::vector<double> gbs;
  std::vector<double> gops;
  for (int i = 0; i < steps; ++i) {
    ASSIGN_OR_RETURN(const double s, bench.step(rows, depth, prefill));
    seconds.push_back(s);
    if (prefill) {
      gops.push_back(bench.peak_gops());
    } else if (i % 4 == 0) {
      gbs.push_back(measure_read_bandwidth(bench.threads() * ranks));
    }
  }
  Timed t{.seconds = samples_of(seconds, true), .times = bench.take_times()};
  if (prefill) {
    t.peak_gops = samples_of(gops, false);
  } else {
    t.read_gbs = samples_of(gbs, false);
  }
  return t;
}

// The operations of a prompt of so many tokens: its linears (not the head, which sees no row here)
// and the causal attention.
double prefill_operations(const Bench& bench, int tokens) {
  const model::Config& c = bench.config();
  const int64_t linears = bench.plan().active_parameters - c.vocab_size * c.hidden_size;
  const int64_t pair = c.num_attention_heads * (c.qk_head_dim() + c.v_head_dim);
  const double keys = (static_cast<double>(tokens) + 1) / 2;  // of a row, on average
  return 2.0 * static_cast<double>(tokens) *
         (static_cast<double>(linears) + static_cast<double>(c.num_hidden_layers * pair) * keys);
}

Status report_prefill(Bench& bench, const BenchModelOptions& o) {
  ASSIGN_OR_RETURN(const Timed t, measure(bench, o.prefill, 0, true, 4, o.ep_size));
  const double operations = prefill_operations(bench, o.prefill) * o.ep_size * 1e-9;
  const auto percent = [&](double seconds, double peak) {
    return 100 * operations / seconds / peak;
  };
  if (o.json) {
    fmt::print("{}\n", nlohmann::ordered_json{{"bench", "prefill"},
                                              {"shape", o.shape},
                                              {"format", o.format},
                                              {"ep_size", o.ep_size},
                                              {"tokens", o.prefill},
                                              {"ms", 1e3 * t.seconds.median},
                                              {"best_ms", 1e3 * t.seconds.best},
                                              {"gops", operations / t.seconds.median},
                                              {"peak_gops", t.peak_gops.median},
                                              {"best_peak_gops", t.peak_gops.best}}
                           .dump());
    return Status::ok();
  }
  fmt::print(
      "prefill {} {} {} tokens: {:.1f} ms  {:.1f} tokens/s  {:.0f} Gop/s = {:.0f} % of {:.0f}"
      "  (best {:.0f} = {:.0f} % of {:.0f})\n   ms:{}\n",
      o.shape, o.format, o.prefill, 1e3 * t.seconds.median,
      o.prefill * o.ep_size / t.seconds.median, operations / t.seconds.median,
      percent(t.seconds.median, t.peak_gops.median), t.peak_gops.median,
      operations / t.seconds.best, percent(t.seconds.best, t.peak_gops.best), t.peak_gops.best,
      parts(t.times, 1e3));
  return Status::ok();
}

}  // namespace

Status bench_decode(const BenchModelOptions& o) {
  Bench bench;
  RETURN_IF_ERROR(bench.open(o));
  const model::MemoryPlan plan = bench.plan();
  for (const int depth : o.depth) {
    for (const int batch : o.batch) {
      ASSIGN_OR_RETURN(const Timed t, measure(bench, batch, depth, false, o.steps, o.ep_size));
      // At batch 1 the bytes are known; a batch shares experts that chance decides.
      const double bytes = static_cast<double>(plan.bytes_per_token) +
                           static_cast<double>(plan.cache_bytes_per_token) * depth;
      const bool alone = batch == 1 && o.ep_size == 1;
      const double rate = batch * o.ep_size / t.seconds.median;
      if (o.json) {
        fmt::print("{}\n", nlohmann::ordered_json{{"bench", "decode"},
                                                  {"shape", o.shape},
                                                  {"format", o.format},
                                                  {"ep_size", o.ep_size},
                                                  {"batch", batch},
                                                  {"depth", depth},
                                                  {"kv_cache_dtype", o.kv_cache_dtype},
                                                  {"ms", 1e3 * t.seconds.median},
                                                  {"best_ms", 1e3 * t.seconds.best},
                                                  {"tokens_per_second", rate},
                                                  {"bytes_per_token", bytes},
                                                  {"read_gbs", t.read_gbs.median},
                                                  {"best_read_gbs", t.read_gbs.best}}
                               .dump());
        continue;
      }
      fmt::print("decode {} {} batch {:3} depth {:5}: {:8.2f} ms  {:7.1f} tokens/s", o.shape,
                 o.format, batch, depth, 1e3 * t.seconds.median, rate);
      if (alone) {
        const double gbs = bytes / t.seconds.median * 1e-9;
        const double best = bytes / t.seconds.best * 1e-9;
        fmt::print(
            "  {:.1f} GB/s = {:.0f} % of {:.1f} GB/s read  (best {:.1f} = {:.0f} % of {:.1f})", gbs,
            100 * gbs / t.read_gbs.median, t.read_gbs.median, best, 100 * best / t.read_gbs.best,
            t.read_gbs.best);
      }
      fmt::print("\n   ms:{}\n", parts(t.times, 1e3));
    }
  }
  if (o.prefill > 0) RETURN_IF_ERROR(report_prefill(bench, o));
  return Status::ok();
}

Status bench_moe(const BenchModelOptions& o) {
  Bench bench;
  RETURN_IF_ERROR(bench.open(o));
  const int layers = bench.moe_layers();
  if (layers == 0) return Status::usage("bench moe needs a shape with MoE layers: raise --layers");
  for (const int tokens : o.batch) {
    ASSIGN_OR_RETURN(const Timed t, measure(bench, tokens, 0, false, o.steps, o.ep_size));
    double sum = 0;
    std::string text;
    for (const auto part :
         {StepTimes::kRoute, StepTimes::kDispatch, StepTimes::kGemm1, StepTimes::kSwiglu,
          StepTimes::kGemm2, StepTimes::kReduce, StepTimes::kCombine}) {
      const double us = t.times.seconds[part] * 1e6 / static_cast<double>(t.times.steps * layers);
      sum += us;
      text += fmt::format("  {} {:.1f}", StepTimes::name(part), us);
    }
    fmt::print("moe {} {} ep {} {:4} tokens a rank: {:8.1f} us a layer:{}\n", o.shape, o.format,
               o.ep_size, tokens, sum, text);
  }
  return Status::ok();
}

}  // namespace sortie::cli
