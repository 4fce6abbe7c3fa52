#include "base/log.h"

#include <spdlog/sinks/stdout_sinks.h>

#include <cstdlib>
#include <string>

namespace sortie {

void init_log(std::string_view level) {
  const char* env = std::getenv("SORTIE_LOG");
  auto logger = spdlog::get("sortie");
  if (!logger) logger = spdlog::stderr_logger_mt("sortie");
  logger->set_pattern("%H:%M:%S.%e %l %v");
  logger->set_level(spdlog::level::from_str(env != nullptr ? env : std::string(level)));
  spdlog::set_default_logger(logger);
}

}  // namespace sortie
