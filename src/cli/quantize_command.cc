#include "cli/quantize_command.h"

#include <fmt/format.h>

#include <atomic>

#include "base/threads.h"
#include "cli/calibrate.h"
#include "cli/ranks.h"
#include "cli/signals.h"
#include "model/quantize.h"

namespace sortie::cli {

Status quantize_command(const QuantizeCommand& c) {
  model::QuantizeOptions options{.in = c.in,
                                 .out = c.out,
                                 .dense_fp8_block = c.dense == "fp8_block",
                                 .threads = c.threads > 0 ? c.threads : available_cpus(),
                                 .quiet = c.quiet};
  ASSIGN_OR_RETURN(options.format, parse_quantization("--format", c.format));
  if (c.rounding != "nearest" && c.rounding != "search") {
    return Status::usage(
        fmt::format("--rounding {} is unknown: take nearest or search", c.rounding));
  }
  if (c.rounding == "search") options.rounding = quant::Rounding::kSearch;
  options.report = c.report;
  const bool w4afp8 = options.format == model::Quantization::kW4Afp8;
  if (!c.dense.empty() && (c.dense != "fp8_block" || !w4afp8)) {
    return Status::usage("--dense takes fp8_block, and only with --format w4afp8");
  }
  if (!c.calibrate.empty() && !w4afp8) {
    return Status::usage("--calibrate makes static activation scales, which only w4afp8 has");
  }
  block_signals();
  std::atomic<bool> stop{false};
  const SignalWatch signals([&] { stop = true; });
  if (!c.calibrate.empty()) {
    RunOptions run;
    run.model = c.in;
    run.calibrate = c.calibrate;
    run.threads = options.threads;
    run.quiet = c.quiet;
    ASSIGN_OR_RETURN(options.expert_amax, calibrate(run));
  }
  options.stop = [&stop] { return stop.load(std::memory_order_relaxed); };
  return model::quantize_checkpoint(options);
}

}  // namespace sortie::cli
