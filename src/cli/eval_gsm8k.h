#pragma once

#include <string>
#include <vector>

#include "cli/ranks.h"
#include "engine/request.h"

namespace sortie::cli {

struct Gsm8kOptions {
  RunOptions run;
  engine::SamplingParams sampling;
  std::string data;  // JSON lines; the first num_shots rows are the examples
  int num_shots = 5;
  int num_questions = 0;  // 0 = all that are left
  int parallel = 0;       // requests in flight; 0 = what the ranks can run
  bool chat = false;      // the model's chat template and no examples
  bool json = false;      // one JSON line instead of the table
  std::string output;     // JSON lines with every answer
};

// sortie eval gsm8k MODEL --data FILE: accuracy with its confidence interval, tokens/s.
Status eval_gsm8k(Gsm8kOptions options, const Launch& launch);

}  // namespace sortie::cli
