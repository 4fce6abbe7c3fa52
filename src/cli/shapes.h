#pragma once

#include <string>

#include "base/status.h"
#include "model/config.h"
#include "model/plan.h"

namespace sortie::cli {

// What the benchmarks run: "v2-lite", or the config.json of a folder; without MTP layers.
Result<model::Config> bench_shape(const std::string& name);

// A checkpoint form by the name of its experts' format; w4afp8 has fp8_block for the other linears.
struct BenchForm {
  model::Dialect dialect = model::Dialect::kBf16;
  model::Formats formats;
};
Result<BenchForm> bench_form(const std::string& name);

}  // namespace sortie::cli
