#include <cstddef>
#include <cstdint>
#include <fstream>
#include <string>
#include <string_view>

#include "base/check.h"
#include "base/folder_test_util.h"
#include "model/safetensors.h"
#include "model/safetensors_index.h"

namespace {

using namespace sortie;
using namespace sortie::model;

// Two shards, "a" in m-1 and "b" in m-2, which an input may name rightly or wrongly.
class Folder {
 public:
  Folder() {
    for (const std::string tensor : {"a", "b"}) {
      SafetensorsWriter writer;
      writer.declare(tensor, DType::kI8, {4});
      CHECK(writer.open(folder_ / (tensor == "a" ? "m-1.safetensors" : "m-2.safetensors")).is_ok());
      CHECK(writer.write("abcd", 4).is_ok() && writer.finish().is_ok());
    }
  }
  Result<std::unique_ptr<Checkpoint>> open(std::string_view index) const {
    std::ofstream(folder_ / "model.safetensors.index.json", std::ios::binary) << index;
    return Checkpoint::open(folder_.path());
  }

 private:
  TemporaryFolder folder_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Folder kFolder;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto index = parse_safetensors_index(text, "fuzz");
  if (!index.is_ok()) {
    CHECK(index.status().message().ends_with('.'), index.status().message());
    return 0;
  }
  for (const auto& [tensor, shard] : *index) {
    CHECK(shard.find('/') == std::string::npos && shard.ends_with(".safetensors"), shard);
  }
  const auto checkpoint = kFolder.open(text);
  if (!checkpoint.is_ok()) {
    CHECK(checkpoint.status().message().ends_with('.'), checkpoint.status().message());
    return 0;
  }
  for (const auto& [tensor, shard] : *index) CHECK((*checkpoint)->find(tensor) != nullptr, tensor);
  for (const auto& [tensor, entry] : (*checkpoint)->tensors()) {
    CHECK(entry.tensor.bytes() == 4 && entry.tensor.data[0] == std::byte{'a'}, tensor);
  }
  return 0;
}
