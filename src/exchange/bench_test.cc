#include "exchange/bench.h"

#include <gtest/gtest.h>

namespace sortie::exchange {
namespace {

TEST(Bench, CountsWhatMoves) {
  const BenchOptions o{.ranks = 2,
                       .experts = 4,
                       .topk = 4,  // every token goes to both ranks
                       .hidden = 16,
                       .tokens = {1, 3},
                       .formats = {{"int8", 20}},
                       .repeats = 3};
  const auto rows = bench_exchange_local(o);
  ASSERT_TRUE(rows.is_ok()) << rows.status().message();
  ASSERT_EQ(rows->size(), 2U);
  for (const BenchRow& row : *rows) {
    // A row to each of two ranks, and a part for each token of two ranks.
    EXPECT_EQ(row.bytes, row.tokens * 2 * 20 + row.tokens * 2 * 16 * 4);
    EXPECT_GT(row.us, 0);
  }
}

}  // namespace
}  // namespace sortie::exchange
