#pragma once

#include "cli/bench_op.h"

namespace sortie::cli {

// bench op --device cuda: the experts' two grouped GEMMs on the GPU, in us, GB/s and % of what a
// read-only kernel over the same bytes of weights takes in the same run.
Status bench_op_gpu(const BenchOpOptions& options);

}  // namespace sortie::cli
