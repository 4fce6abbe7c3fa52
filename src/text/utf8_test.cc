#include "text/utf8.h"

#include <gtest/gtest.h>

namespace sortie::text {
namespace {

TEST(Utf8, EveryCharacterRoundTrips) {
  for (char32_t c = 0; c <= 0x10FFFF; ++c) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    std::string bytes;
    append_utf8(bytes, c);
    const Utf8Step step = utf8_step(bytes);
    ASSERT_EQ(step.kind, Utf8Kind::kValid);
    ASSERT_EQ(step.length, bytes.size());
    ASSERT_EQ(step.code, c);
    for (size_t n = 1; n < bytes.size(); ++n) {
      const Utf8Step part = utf8_step(std::string_view(bytes).substr(0, n));
      ASSERT_EQ(part.kind, Utf8Kind::kIncomplete);
      ASSERT_EQ(part.length, n);
    }
  }
}

// Examples of the Unicode standard, table 3-8 and its neighbours (maximal subparts).
TEST(Utf8, InvalidSubpartsBecomeOneReplacementEach) {
  const std::string r(kReplacement);
  EXPECT_EQ(valid_utf8("a\xF1\x80\x80\xE1\x80\xC2"
                       "b\x80"
                       "c\x80\xBF"
                       "d"),
            "a" + r + r + r + "b" + r + "c" + r + r + "d");
  EXPECT_EQ(valid_utf8("\xED\xA0\x80"), r + r + r);          // a surrogate
  EXPECT_EQ(valid_utf8("\xC0\xAF"), r + r);                  // overlong
  EXPECT_EQ(valid_utf8("\xF4\x90\x80\x80"), r + r + r + r);  // past U+10FFFF
  EXPECT_EQ(valid_utf8("\xE4\xBD"), r);
  EXPECT_FALSE(is_valid_utf8("\xE4\xBD"));
  EXPECT_TRUE(is_valid_utf8("\xE4\xBD\xA0"));
}

TEST(Utf8, CountsCharacters) {
  EXPECT_EQ(utf8_length("a\xC3\xA9\xE4\xBD\xA0"), 3u);
  EXPECT_EQ(utf8_offset("a\xC3\xA9\xE4\xBD\xA0", 2), 3u);
  EXPECT_EQ(utf8_offset("ab", 9), 2u);
}

}  // namespace
}  // namespace sortie::text
