#include "text/test_data.h"

#include <zlib.h>

#include <array>

#include "text/byte_level.h"

namespace sortie::text {

std::string deepseek_tokenizer_json() {
  const std::string path = kData + "tokenizer/tokenizer.json.gz";
  gzFile file = gzopen(path.c_str(), "rb");
  EXPECT_NE(file, nullptr) << path;
  std::string text;
  std::array<char, 1 << 16> buffer{};
  for (int n = 0; (n = gzread(file, buffer.data(), buffer.size())) > 0;) {
    text.append(buffer.data(), static_cast<size_t>(n));
  }
  gzclose(file);
  return text;
}

const Tokenizer& deepseek_tokenizer() {
  static const std::shared_ptr<const Tokenizer> kTokenizer = [] {
    auto result = Tokenizer::parse(deepseek_tokenizer_json(),
                                   read_all(kData + "tokenizer/tokenizer_config.json"));
    EXPECT_TRUE(result.is_ok()) << result.status().message();
    return result.value();
  }();
  return *kTokenizer;
}

nlohmann::json small_tokenizer(const std::vector<std::string>& merges) {
  nlohmann::json vocab = nlohmann::json::object();
  int id = 0;
  for (int b = 0; b < 256; ++b) vocab[byte_symbol(static_cast<uint8_t>(b))] = id++;
  for (const std::string& merge : merges) {
    std::string token = merge;
    token.erase(token.find(' '), 1);
    vocab[token] = id++;
  }
  return {{"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", merges}}},
          {"pre_tokenizer",
           {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}};
}

std::shared_ptr<const Tokenizer> parse_small(const nlohmann::json& file,
                                             const nlohmann::json& config) {
  auto result = Tokenizer::parse(file.dump(), config.is_null() ? "" : config.dump());
  EXPECT_TRUE(result.is_ok()) << result.status().message();
  return result.is_ok() ? result.value() : nullptr;
}

}  // namespace sortie::text
