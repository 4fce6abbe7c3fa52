#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "base/tensor.h"

namespace sortie::model {

// The safetensors format (huggingface/safetensors README): 8 bytes header size, little-endian; a
// JSON object {"name": {"dtype", "shape", "data_offsets": [begin, end]}, …, "__metadata__": {…}};
// the tensors' bytes, without holes or overlaps.
constexpr int64_t kMaxSafetensorsHeader = 100'000'000;

struct HeaderEntry {
  std::string name;
  DType dtype = DType::kOther;
  int rank = 0;
  std::array<int64_t, 4> shape{};
  int64_t begin = 0;  // in the data section
  int64_t end = 0;
};

// Checks everything that a header can lie about. `data_bytes` is the length of the data section.
// Entries come in file order. The message has no file name; the caller puts it in front.
Result<std::vector<HeaderEntry>> parse_safetensors_header(std::string_view json,
                                                          int64_t data_bytes);

// A tensor name from a file, fit for a terminal: no control characters, not endless.
std::string printable(std::string_view name);

}  // namespace sortie::model
