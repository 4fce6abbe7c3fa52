#include "text/tokenizer.h"

#include <chrono>

#include "text/test_data.h"

namespace sortie::text {
namespace {

using Ids = std::vector<int32_t>;
using Json = nlohmann::json;

TEST(Tokenizer, DeepSeekGoldens) {
  const Tokenizer& tokenizer = deepseek_tokenizer();
  const auto rows = read_rows(kData + "tokenizer/goldens.jsonl");
  EXPECT_EQ(rows.size(), 500u);
  for (const auto& row : rows) {
    const auto text = row["text"].get<std::string>();
    const auto ids = row["ids"].get<Ids>();
    const auto encoded = tokenizer.encode(text, false);
    ASSERT_TRUE(encoded.is_ok());
    EXPECT_EQ(*encoded, ids) << text;
    EXPECT_EQ(tokenizer.decode(ids, false), row["decoded"].get<std::string>());
    EXPECT_EQ(tokenizer.decode(ids, true), row["decoded_skip_special"].get<std::string>());
  }
}

TEST(Tokenizer, DeepSeekSpecialTokens) {
  const Tokenizer& tokenizer = deepseek_tokenizer();
  EXPECT_EQ(tokenizer.vocab_size(), 128815);
  EXPECT_EQ(tokenizer.bos_id(), 0);
  EXPECT_EQ(tokenizer.eos_id(), 1);
  EXPECT_EQ(tokenizer.id_of("<｜User｜>"), 128803);
  EXPECT_EQ(tokenizer.id_of("no such token at all"), std::nullopt);
  EXPECT_TRUE(tokenizer.is_special(0));
  EXPECT_FALSE(tokenizer.is_special(128803));
  EXPECT_EQ(tokenizer.encode("Hello!", true).value(), (Ids{0, 19923, 3}));
  EXPECT_EQ(tokenizer.token_bytes(128900), "");
  EXPECT_EQ(tokenizer.token_bytes(-1), "");
}

TEST(Tokenizer, MiniPrompts) {
  const auto tokenizer = Tokenizer::load(SORTIE_SOURCE_DIR "/models/mini");
  ASSERT_TRUE(tokenizer.is_ok()) << tokenizer.status().message();
  const auto golden = Json::parse(read_all(SORTIE_SOURCE_DIR "/models/mini/golden.json"));
  ASSERT_EQ(golden.size(), 12u);
  for (const auto& row : golden) {
    EXPECT_EQ((*tokenizer)->encode(row["text"].get<std::string>(), false).value(),
              row["prompt_ids"].get<Ids>());
    EXPECT_EQ((*tokenizer)->decode(row["greedy_ids"].get<Ids>(), false),
              row["greedy_text"].get<std::string>());
  }
}

TEST(Tokenizer, InvalidUtf8CountsAsReplacementCharacters) {
  const Tokenizer& tokenizer = deepseek_tokenizer();
  EXPECT_EQ(tokenizer.encode("a\xFF\xE4\xBD", false).value(),
            tokenizer.encode("a\xEF\xBF\xBD\xEF\xBF\xBD", false).value());
}

TEST(Tokenizer, AMegabyteOfEnglishTakesAboutASecond) {
  std::string text;
  const auto rows = read_rows(kData + "gsm8k/test_first50.jsonl");
  for (size_t i = 0; text.size() < (1u << 20); ++i) {
    text += rows[i % rows.size()]["question"].get<std::string>() + "\n\n";
  }
  const Tokenizer& tokenizer = deepseek_tokenizer();
  const auto begin = std::chrono::steady_clock::now();
  const auto ids = tokenizer.encode(text, false);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  RecordProperty("microseconds", static_cast<int>(seconds * 1e6));
  EXPECT_EQ(tokenizer.decode(*ids, false), text);
  EXPECT_LT(seconds, 30) << "a second is normal; sanitizers and busy machines take longer";
}

TEST(Tokenizer, RunsWithoutSplitsStayFast) {
  const Tokenizer& tokenizer = deepseek_tokenizer();
  for (const std::string run : {"a", " ", "\n", "!", "\xE4\xBD\xA0"}) {
    std::string text;
    while (text.size() < (1u << 18)) text += run;
    for (const std::string tail : {"", "x"}) {
      const auto ids = tokenizer.encode(text + tail, false);  // n^2 steps would take minutes
      ASSERT_TRUE(ids.is_ok()) << ids.status().message();
      EXPECT_EQ(tokenizer.decode(*ids, false), text + tail);
    }
  }
}

TEST(Tokenizer, MergesMayBePairs) {
  auto file = small_tokenizer({"a b", "ab c"});
  const Ids expected = parse_small(file)->encode("abcab", false).value();
  file["model"]["merges"] = Json::parse(R"([["a", "b"], ["ab", "c"]])");
  EXPECT_EQ(parse_small(file)->encode("abcab", false).value(), expected);
  EXPECT_EQ(expected, (Ids{257, 256}));
}

TEST(Tokenizer, IgnoreMergesTakesWholeWords) {
  auto file = small_tokenizer({"a b"});
  file["model"]["vocab"]["xyz"] = 300;
  EXPECT_EQ(parse_small(file)->encode("xyz", false)->size(), 3u);
  file["model"]["ignore_merges"] = true;
  EXPECT_EQ(parse_small(file)->encode("xyz", false).value(), (Ids{300}));
}

Json added(int id, const std::string& content) {
  return {{"id", id}, {"content", content}, {"special", true}};
}

TEST(Tokenizer, AddedTokensMatchLongestAndKeepTheirFlags) {
  auto file = small_tokenizer({});
  file["added_tokens"] = {added(300, "<a>"), added(301, "<a><b>"), added(302, "LL"),
                          added(303, "RR"), added(304, "word")};
  file["added_tokens"][2]["lstrip"] = true;
  file["added_tokens"][3]["rstrip"] = true;
  file["added_tokens"][4]["single_word"] = true;
  const auto tokenizer = parse_small(file);
  EXPECT_EQ(tokenizer->encode("<a><b><a>", false).value(), (Ids{301, 300}));
  const int32_t x = *tokenizer->id_of("x");
  EXPECT_EQ(tokenizer->encode("x \n LLx", false).value(), (Ids{x, 302, x}));
  EXPECT_EQ(tokenizer->encode("xRR\xC2\xA0 x", false).value(), (Ids{x, 303, x}));
  EXPECT_EQ(tokenizer->encode("word", false).value(), (Ids{304}));
  EXPECT_EQ(tokenizer->encode("xword", false)->size(), 5u);
  EXPECT_EQ(tokenizer->decode(Ids{300, x, 301}, true), "x");
}

TEST(Tokenizer, WhatAddSpecialAdds) {
  auto file = small_tokenizer({});
  file["added_tokens"] = {added(300, "<s>"), added(301, "</s>")};
  const Json config = {{"bos_token", {{"content", "<s>"}}},
                       {"eos_token", "</s>"},
                       {"add_bos_token", true},
                       {"add_eos_token", true}};
  const int32_t x = parse_small(file)->encode("x", false)->at(0);
  EXPECT_EQ(parse_small(file)->encode("x", true).value(), (Ids{x}));
  EXPECT_EQ(parse_small(file, config)->encode("x", true).value(), (Ids{300, x, 301}));
  EXPECT_EQ(parse_small(file, config)->encode("x", false).value(), (Ids{x}));
  // The file's own template comes before the flags.
  file["post_processor"] = {
      {"type", "TemplateProcessing"},
      {"single",
       {{{"SpecialToken", {{"id", "<s>"}, {"type_id", 0}}}},
        {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}}},
      {"special_tokens", {{"<s>", {{"id", "<s>"}, {"ids", {300}}, {"tokens", {"<s>"}}}}}}};
  EXPECT_EQ(parse_small(file, config)->encode("x", true).value(), (Ids{300, x}));
}

std::string error_of(const Json& file) {
  const auto result = Tokenizer::parse(file.dump(), "");
  return result.is_ok() ? "" : result.status().message();
}

TEST(Tokenizer, WhatItCannotDoIsRefusedByName) {
  auto file = small_tokenizer({});
  const auto with = [&](const char* path, Json value) {
    auto changed = file;
    changed[Json::json_pointer(path)] = std::move(value);
    return error_of(changed);
  };
  EXPECT_NE(with("/normalizer", {{"type", "NFKC"}}).find("NFKC"), std::string::npos);
  EXPECT_EQ(with("/normalizer", {{"type", "Sequence"}, {"normalizers", Json::array()}}), "");
  EXPECT_NE(with("/pre_tokenizer", {{"type", "Metaspace"}}).find("Metaspace"), std::string::npos);
  EXPECT_NE(with("/decoder", {{"type", "WordPiece"}}).find("WordPiece"), std::string::npos);
  EXPECT_NE(with("/model/type", "Unigram").find("Unigram"), std::string::npos);
  EXPECT_NE(with("/post_processor", {{"type", "BertProcessing"}}).find("BertProcessing"),
            std::string::npos);
  const auto split = [&](const std::string& pattern) {
    return with("/pre_tokenizer",
                {{"type", "Sequence"},
                 {"pretokenizers",
                  {{{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}},
                   {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}});
  };
  EXPECT_EQ(split(R"(\s+$|[\s\p{L}]+|[[:alpha:]]x)"), "");
  EXPECT_NE(split("[a-z&&[^b]]").find("&&"), std::string::npos);
  EXPECT_NE(split("(").find("does not compile"), std::string::npos);
}

TEST(Tokenizer, HostileFilesGiveASentence) {
  EXPECT_FALSE(Tokenizer::parse("", "").is_ok());
  EXPECT_FALSE(Tokenizer::parse("[]", "").is_ok());
  EXPECT_FALSE(Tokenizer::parse("{}", "").is_ok());
  EXPECT_FALSE(Tokenizer::parse(std::string(100000, '['), "").is_ok());
  auto file = small_tokenizer({"a b"});
  const std::string whole = file.dump();
  for (size_t n = 0; n < whole.size(); n += 97) {
    EXPECT_FALSE(Tokenizer::parse(whole.substr(0, n), "").is_ok());
  }
  const auto with = [&](const char* path, Json value) {
    auto changed = file;
    changed[Json::json_pointer(path)] = std::move(value);
    return error_of(changed);
  };
  EXPECT_NE(with("/model/vocab/a", -1), "");
  EXPECT_NE(with("/model/vocab/a", 2'000'000'000), "");
  EXPECT_NE(with("/model/vocab/a", "1"), "");
  EXPECT_NE(with("/model/vocab/a", 0), "");  // another token's
  EXPECT_NE(with("/model/merges", Json::array({"a"})), "");
  EXPECT_NE(with("/model/merges", Json::parse(R"([["a", "b", "c"]])")), "");
  EXPECT_NE(with("/model/merges", Json::array({"a zz"})), "");
  EXPECT_NE(with("/added_tokens", Json::array({added(3, "taken")})), "");
  EXPECT_NE(with("/added_tokens", Json::array({added(-7, "x")})), "");
  EXPECT_NE(with("/added_tokens", Json::array({added(300, std::string(5000, 'x'))})), "");
  auto lacking = file;
  lacking["model"]["vocab"].erase("z");
  EXPECT_NE(error_of(lacking).find("0x7A"), std::string::npos);
  // A pattern that explodes gives an error, not a hang.
  auto slow = file;
  slow["pre_tokenizer"] = {
      {"type", "Sequence"},
      {"pretokenizers",
       {{{"type", "Split"}, {"pattern", {{"Regex", "(a|aa)+$"}}}, {"behavior", "Isolated"}},
        {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}};
  const auto ids = parse_small(slow)->encode(std::string(200, 'a') + "b", false);
  EXPECT_FALSE(ids.is_ok());
}

TEST(Tokenizer, AFolderWithoutTheFileIsNamed) {
  const auto result = Tokenizer::load("/nonexistent-folder");
  ASSERT_FALSE(result.is_ok());
  EXPECT_NE(result.status().message().find("/nonexistent-folder/tokenizer.json"),
            std::string::npos);
}

}  // namespace
}  // namespace sortie::text
