#include "cli/serving.h"

#include <utility>
#include <vector>

namespace sortie::cli {

namespace {

engine::EngineOptions engine_options(const RunOptions& o) {
  return {.max_running_requests = o.max_running_requests,
          .chunked_prefill_size = o.chunked_prefill_size,
          .context_length = o.context_length};
}

}  // namespace

std::unique_ptr<engine::Engine> start_engine(Ranks& ranks) {
  std::vector<std::unique_ptr<engine::RankLink>> links;
  for (Rank& rank : ranks.local()) {
    links.push_back(
        std::make_unique<engine::LocalLink>(*rank.model, engine_options(ranks.options())));
  }
  auto engine = std::make_unique<engine::Engine>(std::move(links));
  engine->start();
  return engine;
}

}  // namespace sortie::cli
