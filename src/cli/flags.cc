#include "cli/flags.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <vector>

namespace sortie::cli {

void add_run_flags(CLI::App& app, RunOptions& o) {
  app.add_option("MODEL,--model-path", o.model, "the model's folder (Hugging Face layout)")
      ->required();
  app.add_option("--device", o.device, "cpu, cuda (one Hopper GPU) or reference (slow)")
      ->capture_default_str();
  app.add_option("--ep-size", o.ep_size, "expert-parallel ranks, of all nodes")
      ->default_str("1, or as many as a launcher started")
      ->check(at_least(1));
  app.add_option("--nnodes", o.nnodes, "hosts that share the ranks; each is started by hand")
      ->check(at_least(1));
  app.add_option("--node-rank", o.node_rank, "which of them this is, from 0")->check(at_least(0));
  app.add_option("--dist-init-addr", o.dist_init_addr, "HOST:PORT where rank 0 listens");
  app.add_option("--cluster-key-file", o.cluster_key_file,
                 "the secret that all hosts share, mode 600");
  app.add_flag("--insecure", o.insecure, "no key between hosts: whoever reaches the port may join");
  app.add_option("--moe-a2a-backend", o.a2a_backend,
                 "auto, local (ranks are threads) or ucx (ranks are processes)")
      ->capture_default_str();
  app.add_option("--deepep-mode", o.deepep_mode, "auto, low_latency or normal")
      ->capture_default_str();
  app.add_option("--quantization", o.quantization,
                 "quantise a bf16 checkpoint while loading: w4afp8, w8a8_int8, fp8_block (fp8)");
  app.add_option("--dense", o.dense, "w4afp8: the other linears too: fp8_block");
  app.add_option("--calibrate", o.calibrate,
                 "w4afp8: JSON lines that static activation scales come from");
  app.add_option("--threads", o.threads, "threads a rank; 0 = its share of the CPUs")
      ->capture_default_str();
  app.add_option("--max-running-requests", o.max_running_requests, "decode rows a rank")
      ->capture_default_str();
  app.add_option("--chunked-prefill-size", o.chunked_prefill_size, "prompt rows a step and rank")
      ->capture_default_str();
  app.add_option("--context-length", o.context_length, "0 = the model's, at most 8192")
      ->capture_default_str();
  app.add_option("--page-size", o.page_size, "positions a page of the latent cache")
      ->capture_default_str();
  app.add_option("--max-total-tokens", o.max_total_tokens,
                 "latent cache of a rank; 0 = fits the requests")
      ->capture_default_str();
  app.add_option("--kv-cache-dtype", o.kv_cache_dtype,
                 "of latents: fp32, bf16 (half the memory, attention in bf16), or auto: fp32 on "
                 "CPUs, bf16 on GPUs")
      ->capture_default_str();
  app.add_option("--mem-fraction-static", o.mem_fraction_static,
                 "instead: weights and cache take this share of the free memory");
  app.add_option("--decode-segment", o.decode_segment,
                 "keys a segment of decode attention; part of the numerics; 0 = default");
  app.add_option("--max-dispatch-tokens", o.max_dispatch_tokens, "M of low_latency; 0 = default");
  app.add_option("--exchange-timeout", o.exchange_timeout,
                 "seconds from a peer's last sign of life")
      ->capture_default_str();
  app.add_option("--step-timeout", o.step_timeout, "seconds for a peer that lives but is stuck")
      ->capture_default_str();
  app.add_option("--dist-timeout", o.dist_timeout, "seconds for all ranks to come")
      ->capture_default_str();
  app.add_option(
         "--on-rank-loss", o.on_rank_loss,
         "fail: a lost rank ends all; degrade: the others go on without its experts and mark "
         "their answers")
      ->capture_default_str();
  app.add_option("--profile", o.profile,
                 "write a timeline of every rank's steps (Chrome trace) into this file");
  app.add_flag("--quiet", o.quiet, "no plan and no progress");
}

CLI::Validator at_least(double least) {
  return CLI::Validator(
      [least](const std::string& text) {
        double value = 0;
        const bool good = CLI::detail::lexical_cast(text, value) && value >= least;
        return good ? std::string() : fmt::format("{} is not a number of at least {}", text, least);
      },
      "");
}

void add_sampling_flags(CLI::App& app, engine::SamplingParams& s) {
  app.add_option("--max-new-tokens", s.max_new_tokens, "tokens to generate at most")
      ->capture_default_str()
      ->check(at_least(0));
  app.add_option("--temperature", s.temperature, "0 = greedy")
      ->capture_default_str()
      ->check(at_least(0));
  app.add_option("--top-p", s.top_p)->capture_default_str()->check(CLI::Range(0.0, 1.0));
  app.add_option("--top-k", s.top_k, "0 or -1 = all")->capture_default_str();
  app.add_option("--min-p", s.min_p)->capture_default_str()->check(CLI::Range(0.0, 1.0));
  app.add_option("--repetition-penalty", s.repetition_penalty)
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--presence-penalty", s.presence_penalty)->capture_default_str();
  app.add_option("--frequency-penalty", s.frequency_penalty)->capture_default_str();
  app.add_option("--random-seed", s.seed, "of sampling noise")->capture_default_str();
  app.add_flag("--ignore-eos", s.ignore_eos, "go on past the end token");
  app.add_flag("--logprobs", s.logprobs, "print each token's log-probability");
  app.add_option("--top-logprobs", s.top_logprobs, "and those of the best N")
      ->check(CLI::Range(0, 20));
}

namespace {

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substituted = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row[b.size()];
}

// The innermost sub-command that was given.
const CLI::App* innermost(const CLI::App* app) {
  while (!app->get_subcommands().empty()) app = app->get_subcommands().front();
  return app;
}

}  // namespace

std::string usage_error(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App* command = innermost(&app);
  const std::string name = command == &app ? "sortie" : "sortie " + command->get_display_name();
  // What nothing took: a flag if there is one, or else a word, as a mistyped command is.
  std::vector<std::string> extras = command->remaining();
  std::stable_partition(extras.begin(), extras.end(),
                        [](const std::string& e) { return e.starts_with('-'); });
  if (!extras.empty()) {
    const std::string given = extras.front().substr(0, extras.front().find('='));
    std::vector<std::string> known;
    for (const CLI::Option* o : command->get_options()) {
      if (o->get_group().empty()) continue;  // hidden
      for (const std::string& l : o->get_lnames()) known.push_back("--" + l);
    }
    for (const CLI::App* s : command->get_subcommands([](const CLI::App*) { return true; })) {
      known.push_back(s->get_name());
    }
    const auto nearest =
        std::min_element(known.begin(), known.end(), [&](const auto& a, const auto& b) {
          return edit_distance(a, given) < edit_distance(b, given);
        });
    return fmt::format("{}: {} is unknown{}; --help lists what there is", name, given,
                       nearest == known.end() ? "" : "; the nearest is " + *nearest);
  }
  std::string what = error.what();
  if (what == "--model-path is required") what = "MODEL is required: give the model's folder";
  return fmt::format("{}: {}", name, what);
}

}  // namespace sortie::cli
