#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "model/quant_description.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto d = sortie::model::parse_quant_description(
      std::string_view(reinterpret_cast<const char*>(data), size), "fuzz");
  CHECK(d.is_ok() ? !d->empty() : d.status().message().ends_with('.'));
  return 0;
}
