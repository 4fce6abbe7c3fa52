#include "text/detokeniser.h"

#include <random>

#include "text/stop_matcher.h"
#include "text/test_data.h"
#include "text/utf8.h"

namespace sortie::text {
namespace {

using Ids = std::vector<int32_t>;

TEST(Detokeniser, PiecesAreValidAndMakeTheWholeForAllGoldens) {
  const Tokenizer& tokenizer = deepseek_tokenizer();
  for (const auto& row : read_rows(kData + "tokenizer/goldens.jsonl")) {
    for (const bool skip : {false, true}) {
      Detokeniser detokeniser(tokenizer, skip);
      std::string text;
      for (const int32_t id : row["ids"].get<Ids>()) {
        const std::string piece = detokeniser.push(id);
        EXPECT_TRUE(is_valid_utf8(piece));
        text += piece;
      }
      text += detokeniser.finish();
      EXPECT_EQ(text, row[skip ? "decoded_skip_special" : "decoded"].get<std::string>());
    }
  }
}

TEST(Detokeniser, HoldsBackAnUnfinishedCharacterAndRepairsABrokenOne) {
  const auto tokenizer = parse_small(small_tokenizer({}));
  const auto byte = [&](uint8_t b) {
    return *tokenizer->id_of(std::string(1, static_cast<char>(b)));
  };
  Detokeniser detokeniser(*tokenizer, false);
  EXPECT_EQ(detokeniser.push(byte(0xE4)), "");
  EXPECT_EQ(detokeniser.push(byte(0xBD)), "");
  EXPECT_EQ(detokeniser.push(byte(0xA0)), "\xE4\xBD\xA0");
  EXPECT_EQ(detokeniser.push(byte(0xE4)), "");
  EXPECT_EQ(detokeniser.push(byte('a')), std::string(kReplacement) + "a");
  EXPECT_EQ(detokeniser.push(byte(0xFF)), kReplacement);
  EXPECT_EQ(detokeniser.push(byte(0xF0)), "");
  EXPECT_EQ(detokeniser.finish(), kReplacement);
  EXPECT_EQ(detokeniser.finish(), "");
}

TEST(StopMatcher, CutsAtTheStopAndHoldsWhatMayBecomeOne) {
  StopMatcher matcher({"", "Question", "###"});
  EXPECT_EQ(matcher.push("the answer #"), "the answer ");
  EXPECT_EQ(matcher.push("1 Qu"), "#1 ");
  EXPECT_EQ(matcher.push("est"), "");
  EXPECT_EQ(matcher.matched(), -1);
  EXPECT_EQ(matcher.push("ion: more"), "");
  EXPECT_EQ(matcher.matched(), 1);
  EXPECT_EQ(matcher.push("more"), "");
  EXPECT_EQ(matcher.finish(), "");
}

TEST(StopMatcher, WithoutAMatchNothingIsLost) {
  StopMatcher matcher({"abac"});
  std::string text = matcher.push("ababa");
  text += matcher.push("bab");
  text += matcher.finish();
  EXPECT_EQ(text, "abababab");
  EXPECT_EQ(matcher.matched(), -1);
}

// The result must not depend on the pieces, and must be what a search over the whole text gives.
TEST(StopMatcher, AgreesWithASearchHoweverTheTextIsCut) {
  std::mt19937 random(3);
  const auto letters = [&](size_t n) {
    std::string s;
    for (size_t i = 0; i < n; ++i) s += static_cast<char>('a' + random() % 2);
    return s;
  };
  for (int round = 0; round < 2000; ++round) {
    const std::vector<std::string> stops = {letters(1 + random() % 5), letters(2 + random() % 5)};
    const std::string text = letters(random() % 24);
    size_t end = std::string::npos;  // of the stop that is completed first
    size_t begin = 0;
    for (const std::string& stop : stops) {
      const size_t at = text.find(stop);
      if (at == std::string::npos) continue;
      if (at + stop.size() < end || (at + stop.size() == end && at < begin)) {
        end = at + stop.size();
        begin = at;
      }
    }
    StopMatcher matcher(stops);
    std::string out;
    for (size_t at = 0; at < text.size();) {
      const size_t n = 1 + random() % 4;
      out += matcher.push(std::string_view(text).substr(at, n));
      at += n;
    }
    out += matcher.finish();
    EXPECT_EQ(matcher.matched() >= 0, end != std::string::npos);
    EXPECT_EQ(out, end == std::string::npos ? text : text.substr(0, begin));
  }
}

}  // namespace
}  // namespace sortie::text
