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
  if (c.format == "w4afp8") {
    options.format = model::Quantization::kW4Afp8;
  } else if (c.format == "w8a8_int8") {
    options.format = model::Quantization::kW8A8Int8;
  } else if (c.format == "fp8_block" || c.format == "fp8") {
    options.format = model::Quantization::kFp8Block;
  } else {
    return Status::usage(
        fmt::format("--format {} is unknown: take w4afp8, w8a8_int8 or fp8_block", c.format));
  }
  if (!c.dense.empty() && (c.dense != "fp8_block" || c.format != "w4afp8")) {
    return Status::usage("--dense takes fp8_block, and only with --format w4afp8");
  }
  if (!c.calibrate.empty() && c.format != "w4afp8") {
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
  options.stop = &stop;
  return model::quantize_checkpoint(options);
}

}  // namespace sortie::cli
