#include "base/host.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>

#include "base/hash.h"
#include "base/json.h"

namespace sortie {
namespace {

// A UUID, which stays.
TEST(Host, BootId) {
  const std::string id = boot_id();
  ASSERT_EQ(id.size(), 36u) << id;
  EXPECT_EQ(id.find_first_not_of("0123456789abcdef-"), std::string::npos) << id;
  EXPECT_EQ(boot_id(), id);
}

TEST(Host, Name) {
  std::array<char, 256> name{};
  ASSERT_EQ(gethostname(name.data(), name.size() - 1), 0);
  EXPECT_EQ(host_name(), name.data());
}

// Files of /proc have no size until they are read.
TEST(ReadTextFile, FilesWithoutASize) {
  const auto status = read_text_file("/proc/self/status", 1 << 20);
  ASSERT_TRUE(status.is_ok()) << status.status().message();
  EXPECT_NE(status->find("\nPid:\t" + std::to_string(getpid()) + "\n"), std::string::npos);
  const std::string id = "/proc/sys/kernel/random/boot_id";
  EXPECT_EQ(read_text_file(id, 37).value(), boot_id() + "\n");
  const Status over = read_text_file(id, 36).status();
  EXPECT_NE(over.message().find("more than 36 bytes"), std::string::npos) << over.message();
}

uint64_t hash(std::string_view text) { return hash_bytes(std::as_bytes(std::span(text))); }

TEST(HashBytes, EveryByteAndTheLengthCount) {
  const std::string text = "eleven byte";
  for (size_t i = 0; i < text.size(); ++i) {
    std::string other = text;
    other[i] = static_cast<char>(other[i] ^ 1);
    EXPECT_NE(hash(other), hash(text)) << i;
  }
  EXPECT_NE(hash(text + '\0'), hash(text));
  EXPECT_NE(hash(std::string(8, '\0')), hash(std::string(16, '\0')));
  EXPECT_EQ(hash(text), hash(std::string(text)));
}

}  // namespace
}  // namespace sortie
