#include <cstddef>
#include <cstdint>

#include "base/check.h"
#include "model/safetensors_header.h"

// The first 4 bytes are the length of the data section, the rest is the header.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 4) return 0;
  const int64_t data_bytes = data[0] | data[1] << 8 | data[2] << 16;
  const std::string_view header(reinterpret_cast<const char*>(data) + 4, size - 4);
  const auto entries = sortie::model::parse_safetensors_header(header, data_bytes);
  if (!entries.is_ok()) return 0;
  for (const auto& e : *entries) {
    CHECK(e.begin >= 0 && e.begin <= e.end && e.end <= data_bytes && e.rank <= 4);
    const sortie::Tensor t{nullptr, e.dtype, e.rank, e.shape};
    if (e.dtype != sortie::DType::kOther) CHECK(t.bytes() == e.end - e.begin);
  }
  return 0;
}
