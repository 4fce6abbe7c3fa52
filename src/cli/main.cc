// sortie: the command. Each sub-command parses its flags here and lives in a file of its own.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "base/log.h"
#include "cli/bench_exchange.h"
#include "cli/bench_load.h"
#include "cli/bench_model.h"
#include "cli/bench_op.h"
#include "cli/doctor.h"
#include "cli/eval_goldens.h"
#include "cli/eval_gsm8k.h"
#include "cli/flags.h"
#include "cli/quantize_command.h"
#include "cli/run.h"
#include "cli/text_commands.h"
#include "exchange/launcher.h"

namespace sortie::cli {
namespace {

using Action = std::function<Status()>;

// One sub-command: its options live as long as the action that uses them.
template <typename Options>
CLI::App* add_command(CLI::App& parent, const char* name, const char* what, Action& action,
                      std::shared_ptr<Options> options, Status (*function)(const Options&)) {
  CLI::App* command = parent.add_subcommand(name, what);
  command->callback([options, &action, function] {
    action = [options, function] { return function(*options); };
  });
  return command;
}

// The same for commands that may start other ranks, which need the command line again.
template <typename Options>
CLI::App* add_command(CLI::App& parent, const char* name, const char* what, Action& action,
                      std::shared_ptr<Options> options, const Launch& launch,
                      Status (*function)(Options, const Launch&)) {
  CLI::App* command = parent.add_subcommand(name, what);
  command->callback([options, &launch, &action, function] {
    action = [options, &launch, function] { return function(*options, launch); };
  });
  return command;
}

void add_run(CLI::App& app, const Launch& launch, Action& action) {
  auto o = std::make_shared<GenerateOptions>();
  CLI::App* run =
      add_command(app, "run", "generate, streaming to stdout", action, o, launch, run_command);
  add_run_flags(*run, o->run);
  add_sampling_flags(*run, o->sampling);
  run->add_option_function<std::string>(
      "-p,--prompt",
      [o](const std::string& text) {
        o->prompt = text;
        o->has_prompt = true;
      },
      "the prompt");
  run->add_option("--ids", o->ids, "a prompt of token ids, 1,2,3")
      ->delimiter(',')
      ->check(CLI::Validator(
          [](const std::string& text) {
            const bool good = text.find_first_not_of("-0123456789") == std::string::npos &&
                              text.find_first_of("0123456789") != std::string::npos;
            return good ? std::string() : fmt::format("'{}' is not a token id", text);
          },
          ""));
  run->add_option("--stop", o->stop, "a string that ends the answer; may be given again");
  run->add_option("--system", o->system, "with --chat: the system message");
  run->add_flag("--chat", o->chat, "use the model's chat template; without -p a conversation");
  run->add_flag("--stats", o->stats, "speed against its bound, and where a step's time went");
  run->add_flag("--print-ids", o->print_ids, "token ids instead of text");
}

void add_quantize(CLI::App& app, Action& action) {
  auto o = std::make_shared<QuantizeCommand>();
  CLI::App* quantize =
      add_command(app, "quantize", "write a quantised checkpoint", action, o, quantize_command);
  quantize->add_option("IN", o->in, "a bf16 or fp8_block checkpoint's folder")->required();
  quantize->add_option("OUT", o->out, "the new folder")->required();
  quantize->add_option("--format", o->format, "w4afp8, w8a8_int8 or fp8_block")->required();
  quantize->add_option("--dense", o->dense, "w4afp8: the other linears too: fp8_block");
  quantize->add_option("--calibrate", o->calibrate,
                       "w4afp8: JSON lines ({\"text\"} or {\"ids\"}) for static activation scales");
  quantize
      ->add_option("--rounding", o->rounding,
                   "w4afp8: nearest, or search for each group's scale of least squared error")
      ->capture_default_str();
  quantize->add_option("--report", o->report, "write the distortion of each matrix into this file");
  quantize->add_option("--threads", o->threads, "0 = all usable CPUs");
  quantize->add_flag("--quiet", o->quiet, "no progress");
}

void add_eval(CLI::App& app, const Launch& launch, Action& action) {
  CLI::App* eval = app.add_subcommand("eval", "accuracy and agreement with a reference");
  eval->require_subcommand(1);

  auto g = std::make_shared<GoldensOptions>();
  CLI::App* goldens = add_command(*eval, "goldens", "logits and tokens against a reference's",
                                  action, g, launch, eval_goldens);
  add_run_flags(*goldens, g->run);
  goldens->add_option("FILE", g->file, "golden.safetensors or golden.json")->required();
  goldens->add_option("--tolerance", g->tolerance, "relative error that passes");

  auto q = std::make_shared<Gsm8kOptions>();
  q->sampling.max_new_tokens = 512;
  CLI::App* gsm8k =
      add_command(*eval, "gsm8k", "accuracy on word problems", action, q, launch, eval_gsm8k);
  add_run_flags(*gsm8k, q->run);
  add_sampling_flags(*gsm8k, q->sampling);
  gsm8k->add_option("--data", q->data, "JSON lines with question and answer")->required();
  gsm8k->add_option("--num-shots", q->num_shots, "examples, the file's first rows")
      ->capture_default_str()
      ->check(at_least(0));
  gsm8k->add_option("--num-questions", q->num_questions, "0 = all")->check(at_least(0));
  gsm8k->add_option("--parallel", q->parallel, "requests in flight; 0 = what the ranks can run")
      ->check(at_least(0));
  gsm8k->add_option("--output", q->output, "JSON lines with every answer");
  gsm8k->add_flag("--chat", q->chat, "the chat template instead of examples");
  gsm8k->add_flag("--json", q->json, "one JSON line");
}

// Commands over lines of stdin and stdout.
void add_text(CLI::App& app, Action& action) {
  using Function = Status (*)(const TextCommandOptions&, std::istream&, std::ostream&);
  const auto o = std::make_shared<TextCommandOptions>();
  const auto add = [&](const char* name, const char* what, Function function) {
    CLI::App* command = app.add_subcommand(name, what);
    command->add_option("MODEL,--model-path", o->folder, "a folder with the files that this needs")
        ->required();
    command->callback([o, &action, function] {
      action = [o, function] { return function(*o, std::cin, std::cout); };
    });
    return command;
  };
  add("tokenize", "{\"text\"} a line in, {\"ids\"} a line out", tokenize_command)
      ->add_flag("--add-special", o->add_special, "with BOS and whatever else the model adds");
  add("detokenize", "{\"ids\"} a line in, {\"text\"} a line out", detokenize_command)
      ->add_flag("--skip-special", o->skip_special, "special tokens leave no text");
  add("render", "{\"messages\", …} a line in, {\"text\"} or {\"error\"} a line out", render_command)
      ->add_option("--template", o->template_file, "a template file instead of the model's own");
}

void add_bench(CLI::App& app, const Launch& launch, Action& action) {
  CLI::App* bench = app.add_subcommand("bench", "speed against this machine's own bounds");
  bench->require_subcommand(1);

  auto p = std::make_shared<BenchOpOptions>();
  CLI::App* op = add_command(*bench, "op", "the experts' grouped GEMMs", action, p, bench_op);
  op->add_option("--format", p->formats, "bf16, fp8_block, w8a8_int8, w4afp8")->delimiter(',');
  op->add_option("--hidden", p->hidden)->delimiter(',');
  op->add_option("--rows", p->rows, "rows an expert")->delimiter(',');
  op->add_option("--experts", p->experts)->capture_default_str()->check(at_least(1));
  op->add_option("--device", p->device, "cpu or cuda")->capture_default_str();
  op->add_option("--threads", p->threads, "0 = all usable CPUs");
  op->add_option("--seconds", p->seconds, "a case")->capture_default_str();
  op->add_option("--pool-mb", p->pool_mb, "weights rotate through so much: small = from the caches")
      ->capture_default_str();
  op->add_flag("--json", p->json, "JSON lines");

  auto m = std::make_shared<BenchModelOptions>();
  const auto add_model = [&](CLI::App* command) {
    command->add_option("--shape", m->shape, "v2-lite, or a folder with config.json")
        ->capture_default_str();
    command->add_option("--format", m->format)->capture_default_str();
    command->add_option("--layers", m->layers, "0 = all of the shape");
    command->add_option("--ep-size", m->ep_size)->capture_default_str();
    command->add_option("--threads", m->threads, "a rank; 0 = its share");
    command->add_option("--kv-cache-dtype", m->kv_cache_dtype, "fp32 or bf16")
        ->capture_default_str()
        ->check(CLI::IsMember({"fp32", "bf16"}));
    command->add_option("--steps", m->steps)->capture_default_str()->check(at_least(1));
    command->add_flag("--json", m->json, "JSON lines");
  };
  CLI::App* decode = add_command(*bench, "decode", "decode steps of a model made in memory", action,
                                 m, bench_decode);
  add_model(decode);
  decode->add_option("--batch", m->batch, "requests a rank")->delimiter(',');
  decode->add_option("--depth", m->depth, "tokens already cached")->delimiter(',');
  decode->add_option("--prefill", m->prefill, "also a prompt of so many tokens");
  CLI::App* moe =
      add_command(*bench, "moe", "MoE layers, gate to combined output", action, m, bench_moe);
  add_model(moe);
  moe->add_option("--tokens", m->batch, "tokens a rank")->delimiter(',');

  auto x = std::make_shared<BenchExchangeOptions>();
  CLI::App* exchange = add_command(*bench, "exchange", "dispatch and combine between the ranks",
                                   action, x, launch, bench_exchange_command);
  exchange->add_option("--ep-size", x->ep_size)->capture_default_str();
  exchange->add_option("--moe-a2a-backend", x->a2a_backend, "ucx or local")->capture_default_str();
  exchange
      ->add_option("--lane", x->lane, "auto, or tcp: as between hosts, over the loopback device")
      ->capture_default_str();
  exchange->add_option("--tokens", x->tokens, "a rank")->delimiter(',');
  exchange->add_option("--hidden", x->hidden)->capture_default_str();
  exchange->add_option("--topk", x->topk)->capture_default_str();
  exchange->add_option("--experts", x->experts)->capture_default_str();
  exchange->add_option("--repeats", x->repeats)->capture_default_str()->check(at_least(1));
  exchange->add_flag("--json", x->json, "JSON lines");

  auto l = std::make_shared<BenchLoadOptions>();
  CLI::App* load = add_command(*bench, "load", "load time and peak memory of a made checkpoint",
                               action, l, bench_load);
  load->add_option("--shape", l->shape)->capture_default_str();
  load->add_option("--format", l->format)->capture_default_str();
  load->add_option("--folder", l->folder, "where it is written (and removed, if made)")->required();
  load->add_flag("--json", l->json, "a JSON line");
}

void add_doctor(CLI::App& app, Action& action) {
  auto o = std::make_shared<RunOptions>();
  CLI::App* command = add_command(app, "doctor", "this machine, and what a model would need of it",
                                  action, o, doctor);
  add_run_flags(*command, *o);
  command->get_option("MODEL")->required(false);
}

int run(int argc, char** argv) {
  Launch launch;
  launch.child = exchange::take_child_args(argc, argv);
  launch.argc = argc;
  launch.argv = argv;
  init_log("warning");
  CLI::App app("Sortie: an inference engine for DeepSeek-family mixture-of-experts models",
               "sortie");
  app.set_version_flag("--version", "sortie " SORTIE_VERSION);
  app.require_subcommand(1);
  Action action;
  add_run(app, launch, action);
  add_quantize(app, action);
  add_eval(app, launch, action);
  add_text(app, action);
  add_bench(app, launch, action);
  add_doctor(app, action);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    std::cerr << usage_error(app, error) << '\n';
    return 2;
  }
  const Status status = action();
  if (!status.is_ok() && launch.child) {
    // Rank 0 met the same error or names this rank: one sentence is enough.
    spdlog::info("rank {}: {}", launch.child->rank, status.message());
  } else if (!status.is_ok()) {
    std::cerr << "sortie: " << status.message() << '\n';
  }
  return status.exit_code();
}

}  // namespace
}  // namespace sortie::cli

int main(int argc, char** argv) {
  std::signal(SIGPIPE, SIG_IGN);
  try {
    return sortie::cli::run(argc, argv);
  } catch (const std::bad_alloc&) {
    std::cerr
        << "sortie: out of memory: a smaller --max-total-tokens or a quantised form needs less\n";
  } catch (const std::exception& e) {
    std::cerr << "sortie: unexpected: " << e.what() << '\n';
  }
  return 1;
}
