#include "kv/pages.h"

#include <gtest/gtest.h>

namespace sortie::kv {
namespace {

TEST(PagePool, HandsOutTheLowestFreeId) {
  PagePool pool(4);
  EXPECT_EQ(pool.take(), 0);
  EXPECT_EQ(pool.take(), 1);
  EXPECT_EQ(pool.take(), 2);
  pool.release(1);
  pool.release(0);
  EXPECT_EQ(pool.free_pages(), 3);
  EXPECT_EQ(pool.take(), 0);
  EXPECT_EQ(pool.take(), 1);
  EXPECT_EQ(pool.take(), 3);
  EXPECT_EQ(pool.take(), -1);
}

TEST(PagePool, APageIsFreeWhenItsLastReferenceGoes) {
  PagePool pool(1);
  const int32_t page = pool.take();
  pool.add_reference(page);
  pool.release(page);
  EXPECT_EQ(pool.take(), -1);
  pool.release(page);
  EXPECT_EQ(pool.take(), page);
}

TEST(PagePoolDeathTest, ReleasingAFreePageIsABrokenInvariant) {
  PagePool pool(2);
  EXPECT_DEATH(pool.release(0), "references_");
  EXPECT_DEATH(pool.add_reference(5), "references_");
}

TEST(PageTable, GrowsByPagesAndTakesNothingIfItCannotHaveAll) {
  PagePool pool(3);
  PageTable a;
  PageTable b;
  EXPECT_TRUE(a.grow(pool, 1, 4));
  EXPECT_EQ(a.size(), 1);
  EXPECT_TRUE(a.grow(pool, 4, 4));
  EXPECT_EQ(a.size(), 1);
  EXPECT_TRUE(a.grow(pool, 5, 4));
  EXPECT_EQ(a.size(), 2);
  EXPECT_FALSE(b.grow(pool, 5, 4));
  EXPECT_EQ(b.size(), 0);
  EXPECT_EQ(pool.free_pages(), 1);
  a.release(pool);
  EXPECT_EQ(pool.free_pages(), 3);
  EXPECT_TRUE(b.grow(pool, 12, 4));
  EXPECT_EQ(b.data()[0], 0);
  EXPECT_EQ(b.data()[2], 2);
  b.release(pool);
}

}  // namespace
}  // namespace sortie::kv
