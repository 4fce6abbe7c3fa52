#pragma once

#include <string>

#include "base/status.h"
#include "cli/ranks.h"

namespace sortie::cli {

// sortie doctor [MODEL]: the machine, the instruction set and why, and for a model the memory plan
// and the tokens/s that its bytes allow, before anything is loaded. Prints to stdout.
Status doctor(const RunOptions& options);

}  // namespace sortie::cli
