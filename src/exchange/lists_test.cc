#include "exchange/lists.h"

#include <gtest/gtest.h>

#include <vector>

namespace sortie::exchange {
namespace {

TEST(Lists, SmallCaseByHand) {
  // 2 ranks, 4 experts, K = 2; this is rank 1 with experts 2 and 3.
  const std::vector<int32_t> ids0 = {3, 2, 0, 1};  // token 0 has both, token 1 none of them
  const std::vector<float> w0 = {1, 2, 3, 4};
  const std::vector<int32_t> ids1 = {-1, 3, 3, 3};  // a missing id and a repeated one
  const std::vector<float> w1 = {5, 6, 7, 8};
  const std::vector<SourceTokens> sources = {{2, ids0.data(), w0.data()},
                                             {2, ids1.data(), w1.data()}};
  ListBuilder builder(2, 1, 4, 2, 8);
  ExpertRows rows{.ranks = 2, .rank = 1, .experts = 4, .local_experts = 2, .max_tokens = 3};
  builder.build(sources, rows);

  ASSERT_EQ(rows.entries, 5);
  EXPECT_EQ(std::vector<int32_t>(rows.offsets, rows.offsets + 3), (std::vector<int32_t>{0, 1, 5}));
  EXPECT_EQ(std::vector<int32_t>(rows.row_index, rows.row_index + 5),
            (std::vector<int32_t>{0, 0, 3, 4, 4}));
  EXPECT_EQ(std::vector<float>(rows.row_weight, rows.row_weight + 5),
            (std::vector<float>{2, 1, 6, 7, 8}));
  ASSERT_EQ(rows.slots, 6);
  EXPECT_EQ(std::vector<int32_t>(rows.slot_offsets, rows.slot_offsets + 7),
            (std::vector<int32_t>{0, 2, 2, 2, 3, 5, 5}));
  EXPECT_EQ(std::vector<int32_t>(rows.slot_entries, rows.slot_entries + 5),
            (std::vector<int32_t>{0, 1, 2, 3, 4}));

  rows.row_stride = 10;  // rows further apart, the same slots
  builder.build(sources, rows);
  EXPECT_EQ(std::vector<int32_t>(rows.row_index, rows.row_index + 5),
            (std::vector<int32_t>{0, 0, 10, 11, 11}));
  EXPECT_EQ(std::vector<int32_t>(rows.slot_offsets, rows.slot_offsets + 7),
            (std::vector<int32_t>{0, 2, 2, 2, 3, 5, 5}));
}

TEST(Lists, NoTokensAtAll) {
  ListBuilder builder(2, 0, 4, 2, 3);
  ExpertRows rows{.ranks = 2, .max_tokens = 3};
  builder.build(std::vector<SourceTokens>(2), rows);
  EXPECT_EQ(rows.entries, 0);
  EXPECT_EQ(rows.slot_offsets[6], 0);
}

TEST(Lists, BadIdsAreNamed) {
  const std::vector<int32_t> ids = {0, -1, 3, 4};
  EXPECT_TRUE(check_ids(ids, 2, 5, 1, 7));
  const Status high = check_ids(ids, 2, 4, 1, 7);
  EXPECT_EQ(high.message(),
            "layer 7, dispatch: token 1 of rank 1 names expert 4, which is neither -1 (none) nor "
            "one of 0..3");
  EXPECT_FALSE(check_ids(std::vector<int32_t>{-2}, 1, 4, 0, 0));
}

}  // namespace
}  // namespace sortie::exchange
