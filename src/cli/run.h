#pragma once

#include <string>
#include <vector>

#include "cli/ranks.h"
#include "engine/request.h"

namespace sortie::cli {

struct GenerateOptions {
  RunOptions run;
  engine::SamplingParams sampling;
  std::string prompt;  // -p; with --chat and none given: a conversation on stdin
  bool has_prompt = false;
  std::vector<int32_t> ids;  // --ids: a prompt of token ids, for models without a tokenizer
  std::vector<std::string> stop;
  std::string system;
  bool chat = false;
  bool stats = false;
  bool print_ids = false;  // ids instead of text
};

// sortie run MODEL -p "…": streams an answer to stdout; plan, progress and statistics go to stderr.
Status run_command(GenerateOptions options, const Launch& launch);

}  // namespace sortie::cli
