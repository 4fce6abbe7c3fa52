#pragma once

#include <memory>

#include "cli/ranks.h"
#include "engine/group.h"

namespace sortie::cli {

// The engine over all ranks of the group, started. Only in the front's process.
std::unique_ptr<engine::Engine> start_engine(Ranks& ranks);

// A rank whose front is in another process: serves until the front stops it.
Status serve_rank(Ranks& ranks);

}  // namespace sortie::cli
