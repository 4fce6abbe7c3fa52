#include "model/safetensors.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/folder_test_util.h"
#include "base/json.h"
#include "model/safetensors_header.h"

namespace sortie::model {
namespace {

namespace fs = std::filesystem;
const std::string kTiny = std::string(SORTIE_SOURCE_DIR) + "/tests/data/tiny/v3-yarn";

class SafetensorsTest : public testing::Test {
 protected:
  std::string path(const std::string& name) const { return folder_ + "/" + name; }
  void write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path(name), std::ios::binary) << bytes;
  }
  Status opened() const { return Checkpoint::open(folder_).status(); }
  Status opened_file(const std::string& bytes) const {
    write("x.safetensors", bytes);
    return Checkpoint::open_file(path("x.safetensors")).status();
  }

  TemporaryFolder temporary_;
  const std::string folder_ = temporary_.path();
};

std::string file(const std::string& header, const std::string& data) {
  std::string bytes(8, '\0');
  const uint64_t n = header.size();
  std::memcpy(bytes.data(), &n, 8);
  return bytes + header + data;
}

void expect_sentence(const Status& s, const std::string& needle) {
  ASSERT_FALSE(s.is_ok()) << "expected: " << needle;
  EXPECT_EQ(s.code(), StatusCode::kInvalid);
  EXPECT_NE(s.message().find(needle), std::string::npos) << s.message();
  EXPECT_TRUE(s.message().ends_with(".")) << s.message();
}

TEST_F(SafetensorsTest, WritesWhatItReads) {
  SafetensorsWriter w;
  const float floats[] = {1, 2, 3};
  const uint16_t halves[] = {4, 5};
  w.declare("a.\"quoted\" \xc3\xa9", DType::kF32, {3, 1});
  w.declare("b", DType::kBf16, {2});
  w.declare("scalar", DType::kI8, {});
  w.declare("none", DType::kI8, {0, 7});
  ASSERT_TRUE(w.open(path("model.safetensors")).is_ok());
  ASSERT_TRUE(w.write(floats, 12).is_ok());
  ASSERT_TRUE(w.write(halves, 4).is_ok());
  ASSERT_TRUE(w.write("x", 1).is_ok());
  ASSERT_TRUE(w.write("", 0).is_ok());
  EXPECT_FALSE(fs::exists(path("model.safetensors")));  // not before it is whole
  ASSERT_TRUE(w.finish().is_ok());
  const auto r = Checkpoint::open(folder_);
  ASSERT_TRUE(r.is_ok()) << r.status().message();
  const Checkpoint& c = **r;
  EXPECT_EQ(c.tensors().size(), 4u);
  EXPECT_EQ(c.bytes(), 17);
  const Tensor* a = c.find("a.\"quoted\" \xc3\xa9");
  ASSERT_NE(a, nullptr);
  EXPECT_EQ(a->rank, 2);
  EXPECT_EQ(std::memcmp(a->data, floats, 12), 0);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a->data) % 4, 0u);
  EXPECT_EQ(c.find("scalar")->rank, 0);
  EXPECT_EQ(c.find("none")->bytes(), 0);
  EXPECT_EQ(c.find("c"), nullptr);
  EXPECT_EQ(fs::directory_iterator(folder_)->path().filename(), "model.safetensors");
}

TEST_F(SafetensorsTest, AnUnfinishedFileLeavesNothing) {
  {
    SafetensorsWriter w;
    w.declare("a", DType::kI8, {4});
    ASSERT_TRUE(w.open(path("a.safetensors")).is_ok());
  }
  EXPECT_TRUE(fs::is_empty(folder_));
  SafetensorsWriter w;
  w.declare("a", DType::kI8, {4});
  EXPECT_FALSE(w.open(folder_ + "/no/such/a.safetensors").is_ok());
}

TEST_F(SafetensorsTest, LyingHeaders) {
  const auto one = [](const std::string& body) { return R"({"a":)" + body + "}"; };
  const std::string good = one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})");
  ASSERT_TRUE(opened_file(file(good, "12345678")).is_ok());
  ASSERT_TRUE(opened_file(file(good + "   ", "12345678")).is_ok());
  ASSERT_TRUE(opened_file(file("{}", "")).is_ok());
  ASSERT_TRUE(opened_file(file(R"({"__metadata__":{"x":"y","z":{"deep":[1]}}})", "")).is_ok());
  const struct {
    std::string header;
    const char* data;
    const char* needle;
  } cases[] = {
      {good, "1234567", "truncated or its header lies"},
      {good, "123456789", "1 bytes after the last tensor"},
      {one(R"({"dtype":"F32","shape":[3],"data_offsets":[0,8]})"), "12345678", "need 12"},
      {one(R"({"dtype":"F32","shape":[2],"data_offsets":[8,0]})"), "12345678", "before it begins"},
      {one(R"({"dtype":"F32","shape":[2],"data_offsets":[4,12]})"), "123456789012", "hole of 4"},
      {one(R"({"dtype":"F32","shape":[-2],"data_offsets":[0,8]})"), "12345678", "wrong kind"},
      {one(R"({"dtype":"F32","shape":[2.0],"data_offsets":[0,8]})"), "12345678", "wrong kind"},
      {one(R"({"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]})"), "",
       "overflows"},
      {one(R"({"dtype":"F32","shape":[0,4611686018427387904,4],"data_offsets":[0,0]})"), "", ""},
      {one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,18446744073709551615]})"), "12345678",
       "absurd number"},
      {one(R"({"dtype":"F32","shape":[2],"data_offsets":[9223372036854775800,9223372036854775807]})"),
       "12345678", "need 8"},
      {one(R"({"dtype":"F32","shape":[1,1,1,1,2],"data_offsets":[0,8]})"), "12345678",
       "5 dimensions"},
      {one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8,9]})"), "12345678", "data_offsets"},
      {one(R"({"dtype":"F32","shape":[2]})"), "12345678", "lacks dtype, shape or data_offsets"},
      {one(R"({"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]})"), "12345678",
       "twice"},
      {one(R"({"dtype":7,"shape":[2],"data_offsets":[0,8]})"), "12345678", "wrong kind"},
      {one(R"({"dtype":"F32","shape":{"x":1},"data_offsets":[0,8]})"), "12345678", "nested object"},
      {one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1})"), "12345678",
       "unknown key x"},
      {one("5"), "12345678", "wrong kind"},
      {"[]", "", "not a JSON object"},
      {"", "", "not valid JSON"},
      {R"({"a)", "", "not valid JSON"},
      {R"({"__metadata__":5})", "", "wrong kind"},
      {good.substr(0, good.size() - 1) + "," + good.substr(1), "12345678", "a stands there twice"},
      {R"({"a":{"dtype":"I8","shape":[4],"data_offsets":[0,4]},)"
       R"("b":{"dtype":"I8","shape":[4],"data_offsets":[2,6]}})",
       "123456", "b overlaps"},
      {std::string(100, '['), "", "deeper than 64"},
      {one(std::string(70, '{')), "", "deeper than 64"},
      {"{\"a\x1b[31m\":5}", "", "not valid JSON"},
      {"{\"a\\u001b[31m\":5}", "", "a?[31m"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.header);
    const Status s = opened_file(file(c.header, c.data));
    if (*c.needle == '\0') {
      EXPECT_TRUE(s.is_ok()) << s.message();
    } else {
      expect_sentence(s, c.needle);
      EXPECT_NE(s.message().find("x.safetensors"), std::string::npos);
    }
  }
}

TEST_F(SafetensorsTest, UnknownTypesAreKept) {
  const Status s =
      opened_file(file(R"({"a":{"dtype":"F4_E2M1","shape":[2],"data_offsets":[0,1]}})", "x"));
  ASSERT_TRUE(s.is_ok()) << s.message();
  const auto c = Checkpoint::open_file(path("x.safetensors"));
  EXPECT_EQ((*c)->find("a")->dtype, DType::kOther);
}

TEST_F(SafetensorsTest, HeaderSizes) {
  expect_sentence(opened_file(""), "is empty");
  expect_sentence(opened_file("1234567"), "no safetensors file");
  expect_sentence(opened_file(std::string(8, '\xff')), "at most 100000000");
  std::string big(8, '\0');
  big[3] = 5;  // 83,886,080: allowed, but the file has no such bytes
  expect_sentence(opened_file(big + "{}"), "is truncated");
  expect_sentence(Checkpoint::open_file(path("absent")).status(), "Cannot open");
  expect_sentence(Checkpoint::open_file(folder_).status(), "not a regular file");
  ASSERT_EQ(::mkfifo(path("fifo").c_str(), 0600), 0);
  expect_sentence(Checkpoint::open_file(path("fifo")).status(), "not a regular file");
}

// Every place where a download can stop.
TEST_F(SafetensorsTest, TruncatedAnywhere) {
  const std::string whole = read_text_file(kTiny + "/model.safetensors", 1 << 24).value();
  uint64_t header = 0;
  std::memcpy(&header, whole.data(), 8);
  ASSERT_TRUE(opened_file(whole).is_ok());
  for (const size_t length :
       {size_t{0}, size_t{1}, size_t{7}, size_t{8}, size_t{9}, size_t{100}, size_t{header},
        size_t{header} + 7, size_t{header} + 8, size_t{header} + 9, whole.size() / 2,
        whole.size() - 4096, whole.size() - 1}) {
    SCOPED_TRACE(length);
    EXPECT_FALSE(opened_file(whole.substr(0, length)).is_ok());
  }
}

TEST_F(SafetensorsTest, Index) {
  const auto tensor = [](const std::string& name) {
    return file("{\"" + name + R"(":{"dtype":"I8","shape":[4],"data_offsets":[0,4]}})", "abcd");
  };
  const auto index = [&](const std::string& map) {
    write("model.safetensors.index.json", R"({"metadata":{},"weight_map":)" + map + "}");
  };
  expect_sentence(opened(), "neither model.safetensors nor");
  write("m-1.safetensors", tensor("a"));
  write("m-2.safetensors", tensor("b"));
  index(R"({"a":"m-1.safetensors","b":"m-2.safetensors"})");
  {
    const auto c = Checkpoint::open(folder_);
    ASSERT_TRUE(c.is_ok()) << c.status().message();
    EXPECT_EQ((*c)->shard_paths().size(), 2u);
    EXPECT_NE((*c)->find("a"), nullptr);
    EXPECT_NE((*c)->find("b"), nullptr);
  }
  index(R"({"a":"m-1.safetensors","b":"m-3.safetensors","c":"m-4.safetensors"})");
  expect_sentence(opened(), "missing m-3.safetensors, m-4.safetensors");
  index(R"({"a":"m-1.safetensors","b":"m-1.safetensors"})");
  expect_sentence(opened(), "holds tensor b, but it does not");
  index(R"({"a":"m-2.safetensors","b":"m-1.safetensors"})");
  expect_sentence(opened(), "but it does not");
  for (const char* name : {"../m-1.safetensors", "/etc/passwd", "/tmp/x.safetensors", "..", "",
                           "sub/m.safetensors", ".safetensors", "m-1.bin",
                           "m-1.safetensors\\u0000.safetensors", "\\u001b[2J.safetensors"}) {
    SCOPED_TRACE(name);
    index(std::string(R"({"a":")") + name + "\"}");
    expect_sentence(opened(), "no plain *.safetensors name");
  }
  index(R"({"a":5})");
  expect_sentence(opened(), "no plain *.safetensors name");
  write("model.safetensors.index.json", "{}");
  expect_sentence(opened(), "lacks \"weight_map\"");
  write("model.safetensors.index.json", "[");
  expect_sentence(opened(), "not valid JSON");
  write("model.safetensors.index.json", std::string(1000, '['));
  expect_sentence(opened(), "deeper than 64");
  write("m-2.safetensors", tensor("a"));
  index(R"({"a":"m-1.safetensors","b":"m-2.safetensors"})");
  expect_sentence(opened(), "and in another shard");
}

TEST_F(SafetensorsTest, LinksMayNotLeaveTheFolder) {
  const std::string one = file(R"({"a":{"dtype":"I8","shape":[4],"data_offsets":[0,4]}})", "abcd");
  fs::create_directories(path("model"));
  write("outside.safetensors", one);
  fs::create_symlink(path("outside.safetensors"), path("model/m.safetensors"));
  write("model/model.safetensors.index.json", R"({"weight_map":{"a":"m.safetensors"}})");
  expect_sentence(Checkpoint::open(path("model")).status(), "leaves the model folder");
  fs::remove(path("model/m.safetensors"));
  write("model/real.safetensors", one);
  fs::create_symlink("real.safetensors", path("model/m.safetensors"));
  EXPECT_TRUE(Checkpoint::open(path("model")).is_ok());
  fs::create_symlink(path("outside.safetensors"), path("model/model.safetensors"));
  expect_sentence(Checkpoint::open(path("model")).status(), "leaves the model folder");
  // Hugging Face's cache links from snapshots/<revision>/ to blobs/.
  fs::create_directories(path("models--x/blobs"));
  fs::create_directories(path("models--x/snapshots/0123"));
  write("models--x/blobs/ff00", one);
  fs::create_symlink("../../blobs/ff00", path("models--x/snapshots/0123/model.safetensors"));
  const auto cached = Checkpoint::open(path("models--x/snapshots/0123"));
  EXPECT_TRUE(cached.is_ok()) << cached.status().message();
}

TEST_F(SafetensorsTest, DroppedPagesReadTheSameAgain) {
  fs::copy_file(kTiny + "/model.safetensors", path("model.safetensors"));
  const auto c = Checkpoint::open(folder_);
  ASSERT_TRUE(c.is_ok());
  for (const auto& [name, entry] : (*c)->tensors()) {
    const std::string before(reinterpret_cast<const char*>(entry.tensor.data),
                             static_cast<size_t>(entry.tensor.bytes()));
    (*c)->drop_pages(entry.tensor);
    EXPECT_EQ(std::memcmp(before.data(), entry.tensor.data, before.size()), 0) << name;
  }
  EXPECT_TRUE((*c)->check().is_ok());
}

}  // namespace
}  // namespace sortie::model
