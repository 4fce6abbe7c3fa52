#include "backends/cuda/sm90_w4afp8.h"

#include <algorithm>

namespace sortie::cuda {

namespace {

// Whether any nibble of the bytes is 8.
bool holds_minus_eight(const std::byte* bytes, int64_t n) {
  return std::any_of(bytes, bytes + n, [](std::byte b) {
    const auto v = static_cast<unsigned>(b);
    return (v & 0xfu) == 8 || v >> 4 == 8;
  });
}

}  // namespace

bool w4_can_arrange(const quant::Matrix* host, int64_t count) {
  return std::all_of(host, host + count, [&](const quant::Matrix& m) {
    return m.format == quant::Format::kW4Afp8 && m.n == host->n && m.k == host->k &&
           w4_fits(m.n, m.k) && !holds_minus_eight(m.codes, m.n * m.code_row_bytes());
  });
}

}  // namespace sortie::cuda
