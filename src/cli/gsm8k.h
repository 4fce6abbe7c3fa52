#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

// GSM8K's file format and scoring (Cobbe et al. 2021, arXiv 2110.14168).
namespace sortie::cli {

struct Problem {
  std::string question;
  std::string answer;  // ends in "#### NUMBER"
};

// JSON lines with "question" and "answer".
Result<std::vector<Problem>> read_problems(const std::string& path);

// The last number of a text, commas dropped ("1,248." is 1248); none if there is no number.
std::optional<double> last_number(std::string_view text);

// "Question: …\nAnswer: …\n\n" for each shot, then "Question: …\nAnswer:".
std::string few_shot_prompt(const std::vector<Problem>& shots, const std::string& question);

// Wilson's 95 % interval of a share.
struct Interval {
  double low;
  double high;
};
Interval wilson(int64_t right, int64_t total);

}  // namespace sortie::cli
