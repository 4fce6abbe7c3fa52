#pragma once

#include <string>

#include "base/status.h"

namespace sortie::cli {

struct BenchLoadOptions {
  std::string shape = "v2-lite";
  std::string format = "w4afp8";
  std::string folder;  // where the checkpoint is written and, if it was made here, removed again
  bool json = false;
};

// sortie bench load: writes a random checkpoint of the shape, loads it in a fresh process, and
// prints how long that took and its peak resident memory (VmHWM) against the weights' bytes.
Status bench_load(const BenchLoadOptions& options);

}  // namespace sortie::cli
