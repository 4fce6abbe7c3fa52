#pragma once

#include <spdlog/spdlog.h>

#include <string_view>

namespace sortie {

// Sends spdlog's default logger to stderr as "time level message". `level` is one of spdlog's names
// (trace, debug, info, warning, error, off); SORTIE_LOG overrides it.
void init_log(std::string_view level);

}  // namespace sortie
