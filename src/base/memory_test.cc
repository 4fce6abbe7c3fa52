#include "base/memory.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <limits>

#include "base/folder_test_util.h"
#include "base/saturate.h"

namespace sortie {
namespace {

namespace fs = std::filesystem;

// A tree of files as Linux shows them under /proc and /sys.
class Machine : public ::testing::Test {
 protected:
  void SetUp() override { write("/proc/meminfo", "MemTotal: 2000 kB\nMemAvailable:    1000 kB\n"); }
  void write(const std::string& path, const std::string& text) const {
    fs::create_directories(fs::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }
  TemporaryFolder folder_;
  const std::string root_ = folder_.path();
};

TEST_F(Machine, WithoutGroupsTheSystemCounts) {
  const FreeMemory free = free_memory(root_);
  EXPECT_EQ(free.bytes, 1000 * 1024);
  EXPECT_EQ(free.limit, "MemAvailable");
}

TEST_F(Machine, CgroupV2CountsEveryGroupAndSparesTheCache) {
  write("/proc/self/cgroup", "0::/a/b\n");
  write("/sys/fs/cgroup/a/memory.max", "500000\n");
  write("/sys/fs/cgroup/a/memory.current", "400000\n");
  write("/sys/fs/cgroup/a/memory.stat", "anon 1\nfile 300000\nshmem 100000\n");
  write("/sys/fs/cgroup/a/b/memory.max", "max\n");
  write("/sys/fs/cgroup/a/b/memory.current", "400000\n");
  EXPECT_EQ(free_memory(root_).bytes, 300000);
  EXPECT_EQ(free_memory(root_).limit, "cgroup /a");
  write("/sys/fs/cgroup/a/b/memory.max", "450000\n");
  EXPECT_EQ(free_memory(root_).bytes, 50000);
  EXPECT_EQ(free_memory(root_).limit, "cgroup /a/b");
}

// In a container /proc may name a path that the container does not see; its own group is the root.
TEST_F(Machine, CgroupV1AndHiddenPaths) {
  write("/proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/77\n0::/\n");
  write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "600000\n");
  write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "700000\n");
  write("/sys/fs/cgroup/memory/memory.stat", "cache 7\ntotal_cache 300000\ntotal_shmem 0\n");
  EXPECT_EQ(free_memory(root_).bytes, 200000);
  EXPECT_EQ(free_memory(root_).limit, "cgroup /");
  write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(free_memory(root_).limit, "MemAvailable");
  write("/proc/self/cgroup", "4:memory\n4:memory:\n:::::\n\n4:memory:relative/path\n");
  EXPECT_EQ(free_memory(root_).limit, "MemAvailable");
}

TEST(Memory, ThisProcess) {
  EXPECT_GT(resident_bytes(), 1 << 20);
  EXPECT_GE(peak_resident_bytes(), resident_bytes());
  EXPECT_GT(free_memory().bytes, 0);
}

TEST(Saturate, StopsAtTheLargest) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(saturating_add(2, 3), 5);
  EXPECT_EQ(saturating_add(kMost, 1), kMost);
  EXPECT_EQ(saturating_product(2, 3, 4), 24);
  EXPECT_EQ(saturating_product(int64_t{1} << 40, int64_t{1} << 40, 8), kMost);
  EXPECT_EQ(saturating_product(kMost, kMost, 0), 0);
}

}  // namespace
}  // namespace sortie
