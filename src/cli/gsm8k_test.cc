#include "cli/gsm8k.h"

#include <gtest/gtest.h>

namespace sortie::cli {
namespace {

TEST(Gsm8k, LastNumber) {
  EXPECT_EQ(last_number("#### 1,248"), 1248);
  EXPECT_EQ(last_number("so $3.50 and then 7."), 7);
  EXPECT_EQ(last_number("costs $1,000.25."), 1000.25);
  EXPECT_EQ(last_number("it fell to -12 degrees"), -12);
  EXPECT_EQ(last_number("1, 2, 3"), 3);
  EXPECT_EQ(last_number("49/7 = <<49/7=7>>7 pencils"), 7);
  EXPECT_EQ(last_number("no number"), std::nullopt);
  EXPECT_EQ(last_number(""), std::nullopt);
}

TEST(Gsm8k, FewShotPrompt) {
  EXPECT_EQ(few_shot_prompt({{"a?", "b #### 1"}}, "c?"),
            "Question: a?\nAnswer: b #### 1\n\nQuestion: c?\nAnswer:");
}

// Worked example: 692 of 700 (Wilson 1927 with z = 1.96).
TEST(Gsm8k, WilsonInterval) {
  const Interval i = wilson(692, 700);
  EXPECT_NEAR(i.low, 0.97762, 1e-4);
  EXPECT_NEAR(i.high, 0.99420, 1e-4);
  EXPECT_EQ(wilson(0, 10).low, 0);
  EXPECT_NEAR(wilson(10, 10).high, 1, 1e-12);
}

TEST(Gsm8k, ReadsItsFileFormat) {
  const auto problems = read_problems(SORTIE_SOURCE_DIR "/tests/data/gsm8k/test_first50.jsonl");
  ASSERT_TRUE(problems.is_ok()) << problems.status().message();
  EXPECT_EQ(problems->size(), 50u);
  EXPECT_EQ(last_number((*problems)[0].answer), 18);
  EXPECT_FALSE(read_problems("/nowhere").is_ok());
}

}  // namespace
}  // namespace sortie::cli
