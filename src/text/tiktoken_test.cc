#include "text/tiktoken.h"

#include <fmt/format.h>

#include <fstream>

#include "base/folder_test_util.h"
#include "text/byte_level.h"
#include "text/test_data.h"

namespace sortie::text {
namespace {

using Ids = std::vector<int32_t>;
using Json = nlohmann::json;

std::string base64(std::string_view bytes) {
  constexpr std::string_view kAlphabet =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t bits = 0;
    for (size_t j = 0; j < 3; ++j) {
      bits = bits << 8 | (i + j < bytes.size() ? static_cast<uint8_t>(bytes[i + j]) : 0U);
    }
    for (size_t j = 0; j < 4; ++j) {
      text += i + j > bytes.size() ? '=' : kAlphabet[bits >> (18 - 6 * j) & 63];
    }
  }
  return text;
}

std::string file_of(const std::vector<std::string>& tokens) {
  std::string file;
  for (size_t i = 0; i < tokens.size(); ++i) file += base64(tokens[i]) + fmt::format(" {}\n", i);
  return file;
}

std::vector<std::string> all_bytes() {
  std::vector<std::string> tokens;
  for (int b = 0; b < 256; ++b) tokens.emplace_back(1, static_cast<char>(b));
  return tokens;
}

std::shared_ptr<const Tokenizer> small(const std::vector<std::string>& more,
                                       const Json& config = Json::object()) {
  std::vector<std::string> tokens = all_bytes();
  tokens.insert(tokens.end(), more.begin(), more.end());
  auto result = Tokenizer::parse_tiktoken(file_of(tokens), config.dump());
  EXPECT_TRUE(result.is_ok()) << result.status().message();
  return result.is_ok() ? *result : nullptr;
}

// DeepSeek-V3's vocabulary in the other form: its bytes and then its merges, in their order.
struct Converted {
  std::vector<std::string> tokens;
  Ids id_of_rank;
  Json file;  // the first form, cut into words as the second is
};
const Converted& converted() {
  static const Converted kResult = [] {
    Converted c;
    c.file = Json::parse(deepseek_tokenizer_json());
    c.file.erase("added_tokens");
    c.file.erase("post_processor");
    c.file["pre_tokenizer"] = {
        {"type", "Sequence"},
        {"pretokenizers",
         {{{"type", "Split"}, {"pattern", {{"Regex", kMoonshotPattern}}}, {"behavior", "Isolated"}},
          {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}};
    const Json& vocabulary = c.file["model"]["vocab"];
    std::vector<bool> seen(200'000, false);
    const auto add = [&](const std::string& spelling) {
      const auto id = vocabulary.at(spelling).get<int32_t>();
      if (seen[static_cast<size_t>(id)]) return;
      seen[static_cast<size_t>(id)] = true;
      c.tokens.push_back(*symbols_to_bytes(spelling));
      c.id_of_rank.push_back(id);
    };
    for (int b = 0; b < 256; ++b) {
      const std::string symbol = byte_symbol(static_cast<uint8_t>(b));
      if (vocabulary.contains(symbol)) add(symbol);
    }
    for (const Json& merge : c.file["model"]["merges"]) {
      auto spelling = merge.get<std::string>();
      spelling.erase(spelling.find(' '), 1);
      add(spelling);
    }
    return c;
  }();
  return kResult;
}

TEST(Tiktoken, DeepSeeksVocabularyGivesTheSameTokensInThisForm) {
  const auto ours = Tokenizer::parse_tiktoken(file_of(converted().tokens), "");
  ASSERT_TRUE(ours.is_ok()) << ours.status().message();
  const auto theirs = Tokenizer::parse(converted().file.dump(), "");
  ASSERT_TRUE(theirs.is_ok()) << theirs.status().message();
  int same_as_golden = 0;
  int same = 0;
  const auto rows = read_rows(kData + "tokenizer/goldens.jsonl");
  for (const auto& row : rows) {
    const auto text = row["text"].get<std::string>();
    Ids ids = (*ours)->encode(text, false).value();
    EXPECT_EQ((*ours)->decode(ids, false), row["decoded"].get<std::string>());
    for (int32_t& id : ids) id = converted().id_of_rank[static_cast<size_t>(id)];
    same += ids == (*theirs)->encode(text, false).value() ? 1 : 0;
    same_as_golden += ids == row["ids"].get<Ids>() ? 1 : 0;
  }
  EXPECT_EQ(same, 500);
  EXPECT_EQ(same_as_golden, 446);  // the others have words that DeepSeek cuts differently
}

std::vector<std::string> words(const std::string& text) {
  static const auto kSplitter = [] {
    auto made = PreTokenizer::make(converted().file["pre_tokenizer"]);
    EXPECT_TRUE(made.is_ok()) << made.status().message();
    return std::move(*made);
  }();
  std::vector<std::string_view> pieces;
  EXPECT_TRUE(kSplitter.split(text, pieces).is_ok());
  return {pieces.begin(), pieces.end()};
}

using Words = std::vector<std::string>;

TEST(Tiktoken, MoonshotsPattern) {
  EXPECT_EQ(words("Hello, world! 你好，世界！"),
            (Words{"Hello", ",", " world", "!", " ", "你好", "，", "世界", "！"}));
  EXPECT_EQ(words("HTTPServer iPhone ABC"), (Words{"HTTPServer", " i", "Phone", " ABC"}));
  EXPECT_EQ(words("don't WE'LL he'S"), (Words{"don't", " WE'LL", " he'S"}));
  EXPECT_EQ(words("1234567 12"), (Words{"123", "456", "7", " ", "12"}));
  EXPECT_EQ(words("a\n\n  b  \r\n"), (Words{"a", "\n\n", " ", " b", "  \r\n"}));
  EXPECT_EQ(words("end   "), (Words{"end", "   "}));
  EXPECT_EQ(words("x += y;\n"), (Words{"x", " +=", " y", ";\n"}));
  EXPECT_EQ(words("日本語のテスト"), (Words{"日本語", "のテスト"}));
  EXPECT_EQ(words("中文abc中文"), (Words{"中文", "abc", "中文"}));
  // A mark that Chinese uses without being of its script is no Han letter.
  EXPECT_EQ(words("中、文"), (Words{"中", "、", "文"}));
  EXPECT_EQ(words("naïve cafe\u0301"), (Words{"naïve", " cafe\u0301"}));
}

TEST(Tiktoken, AnyTwoNeighboursThatMakeATokenMerge) {
  // "abc" was made of "ab" and "c", but "a" and "bc" make it too; "bc" comes first.
  const auto t = small({"bc", "abc", "ab"});
  EXPECT_EQ(t->encode("1abc", false).value(), (Ids{'1', 257}));
  EXPECT_EQ(t->encode("abab", false).value(), (Ids{258, 258}));
}

TEST(Tiktoken, AddedAndReservedTokens) {
  const Json config = {{"bos_token", "[BOS]"},
                       {"eos_token", "[EOS]"},
                       {"added_tokens_decoder",
                        {{"257", {{"content", "[BOS]"}, {"special", true}}},
                         {"258", {{"content", "[EOS]"}, {"special", true}}},
                         {"260", {{"content", "<tool>"}, {"special", false}}}}}};
  const auto t = small({"ab"}, config);
  EXPECT_EQ(t->bos_id(), 257);
  EXPECT_EQ(t->eos_id(), 258);
  EXPECT_EQ(t->vocab_size(), 257 + 256);
  EXPECT_EQ(t->encode("[BOS]ab<tool><|reserved_token_259|>", false).value(),
            (Ids{257, 256, 260, 259}));
  EXPECT_EQ(t->encode("ab", true).value(), (Ids{256}));
  EXPECT_EQ(t->decode(Ids{257, 256, 260, 259}, true), "ab<tool>");
}

std::string refusal(const std::string& file) {
  const auto result = Tokenizer::parse_tiktoken(file, "");
  return result.is_ok() ? "" : result.status().message();
}

TEST(Tiktoken, LyingFilesGetASentence) {
  const std::string good = file_of(all_bytes());
  EXPECT_EQ(refusal(good), "");
  EXPECT_NE(refusal("").find("it has no tokens"), std::string::npos);
  for (const char* line :
       {"YWI", "YWI= ", "YWI= x", "YWI= -1", "YWI= 256 1", "YW=I 256", "YWJ= 256", "= 256", " 256",
        "YWI= 99999999999999999999", "YWI= 1000000", "YWI 256"}) {
    EXPECT_NE(refusal(good + line).find("line 257 is not"), std::string::npos) << line;
  }
  EXPECT_NE(refusal(good + "YWI= 7").find("rank 7 again"), std::string::npos);
  EXPECT_NE(refusal(good + "YWI= 300").find("257 tokens, but the largest rank is 300"),
            std::string::npos);
  std::vector<std::string> fewer = all_bytes();
  fewer[65] = "AA";
  EXPECT_NE(refusal(file_of(fewer)).find("no token for the byte 0x41"), std::string::npos);
}

TEST(Tiktoken, AFolderWithoutTokenizerJson) {
  const TemporaryFolder folder;
  std::ofstream(folder / "tiktoken.model") << file_of(all_bytes());
  const auto t = Tokenizer::load(folder.path());
  ASSERT_TRUE(t.is_ok()) << t.status().message();
  EXPECT_EQ((*t)->encode("a", false).value(), (Ids{'a'}));
  std::ofstream(folder / "tiktoken.model") << "nonsense";
  const auto bad = Tokenizer::load(folder.path());
  ASSERT_FALSE(bad.is_ok());
  EXPECT_NE(bad.status().message().find(folder.path() + ": tiktoken.model cannot be used: line 1"),
            std::string::npos);
}

}  // namespace
}  // namespace sortie::text
