#include "cli/gsm8k.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

namespace sortie::cli {

Result<std::vector<Problem>> read_problems(const std::string& path) {
  std::ifstream file(path);
  if (!file) return Status::usage(fmt::format("--data {}: the file cannot be read", path));
  std::vector<Problem> problems;
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    try {
      const nlohmann::json row = nlohmann::json::parse(line);
      problems.push_back(
          {row.at("question").get<std::string>(), row.at("answer").get<std::string>()});
    } catch (const nlohmann::json::exception&) {
      return Status::invalid(
          fmt::format("{} line {}: not a JSON object with the strings \"question\" and \"answer\"",
                      path, number));
    }
    if (!last_number(problems.back().answer)) {
      return Status::invalid(fmt::format("{} line {}: the answer holds no number", path, number));
    }
  }
  return problems;
}

std::optional<double> last_number(std::string_view text) {
  const auto digit = [&](size_t i) { return i < text.size() && text[i] >= '0' && text[i] <= '9'; };
  size_t end = text.size();
  while (end > 0 && !digit(end - 1)) --end;
  if (end == 0) return std::nullopt;
  size_t begin = end;
  bool point = false;
  while (begin > 0) {
    const char c = text[begin - 1];
    const bool joins = digit(begin - 1) ||
                       (c == ',' && digit(begin) && begin >= 2 && digit(begin - 2)) ||
                       (c == '.' && !point && begin >= 2 && digit(begin - 2));
    if (!joins) break;
    point = point || c == '.';
    --begin;
  }
  if (begin > 0 && text[begin - 1] == '-') --begin;
  std::string number;
  for (const char c : text.substr(begin, end - begin)) {
    if (c != ',') number += c;
  }
  return std::strtod(number.c_str(), nullptr);
}

std::string few_shot_prompt(const std::vector<Problem>& shots, const std::string& question) {
  std::string prompt;
  for (const Problem& p : shots) {
    prompt += fmt::format("Question: {}\nAnswer: {}\n\n", p.question, p.answer);
  }
  return prompt + fmt::format("Question: {}\nAnswer:", question);
}

Interval wilson(int64_t right, int64_t total) {
  if (total == 0) return {0, 1};
  constexpr double kZ = 1.959964;  // 97.5 % quantile of the normal distribution
  const auto n = static_cast<double>(total);
  const double p = static_cast<double>(right) / n;
  const double centre = (p + kZ * kZ / (2 * n)) / (1 + kZ * kZ / n);
  const double half = kZ / (1 + kZ * kZ / n) * std::sqrt(p * (1 - p) / n + kZ * kZ / (4 * n * n));
  return {std::max(0.0, centre - half), std::min(1.0, centre + half)};
}

}  // namespace sortie::cli
