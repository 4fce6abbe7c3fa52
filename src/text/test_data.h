#pragma once

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "text/tokenizer.h"

namespace sortie::text {

inline const std::string kData = SORTIE_SOURCE_DIR "/tests/data/";

inline std::string read_all(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.good()) << path;
  return {std::istreambuf_iterator<char>(file), {}};
}

// The objects of a .jsonl file, keys in order.
inline std::vector<nlohmann::ordered_json> read_rows(const std::string& path) {
  std::vector<nlohmann::ordered_json> rows;
  std::ifstream file(path);
  EXPECT_TRUE(file.good()) << path;
  for (std::string line; std::getline(file, line);) {
    rows.push_back(nlohmann::ordered_json::parse(line));
  }
  return rows;
}

// tests/data/tokenizer/tokenizer.json.gz, unpacked.
std::string deepseek_tokenizer_json();
// DeepSeek-V3's tokenizer, loaded once.
const Tokenizer& deepseek_tokenizer();

// A tokenizer.json of the 256 bytes and the given merges, for a test to change.
nlohmann::json small_tokenizer(const std::vector<std::string>& merges);
std::shared_ptr<const Tokenizer> parse_small(const nlohmann::json& file,
                                             const nlohmann::json& config = nullptr);

}  // namespace sortie::text
