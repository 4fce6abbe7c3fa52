#include "quant/matrix_ops.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "base/scalar.h"
#include "quant/fp8_block.h"
#include "quant/w4afp8.h"
#include "quant/w8a8_int8.h"

namespace sortie::quant {

void dequantise_row(const Matrix& w, int64_t row, float* out) {
  const std::byte* codes = w.row(row);
  const auto* bytes = reinterpret_cast<const uint8_t*>(codes);
  switch (w.format) {
    case Format::kF32:
      std::memcpy(out, codes, static_cast<size_t>(w.k) * sizeof(float));
      return;
    case Format::kBf16:
      for (int64_t c = 0; c < w.k; ++c) out[c] = to_float(load_unaligned<bf16>(codes + 2 * c));
      return;
    case Format::kFp8Block:
      fp8_block::dequantise_row(bytes, fp8_block::row_scales(w.f32_scales(), w.k, row), w.k, out);
      return;
    case Format::kW4Afp8:
      w4afp8::dequantise_row(bytes, w.bf16_scales() + row * w.k_groups(), w.k, out);
      return;
    case Format::kW8A8Int8:
      w8a8_int8::dequantise_row(reinterpret_cast<const int8_t*>(codes), w.f32_scales()[row], w.k,
                                out);
      return;
  }
}

namespace {

// `rows` rows from `first` on, quantised into `target` (whose code_row_bytes and scale layout are
// meant; its pointers are those of the whole matrix).
void quantise_band(const float* w, int64_t first, int64_t rows, const Matrix& target,
                   std::byte* codes, void* scales) {
  const int64_t k = target.k;
  codes += first * target.code_row_bytes();
  auto* bytes = reinterpret_cast<uint8_t*>(codes);
  switch (target.format) {
    case Format::kFp8Block:
      fp8_block::quantise(w, rows, k, bytes,
                          static_cast<float*>(scales) + first / kGroup * target.k_groups());
      return;
    case Format::kW4Afp8: {
      std::vector<float> written(static_cast<size_t>(w4afp8::scale_count(rows, k)));
      w4afp8::quantise(w, rows, k, bytes, written.data());
      std::transform(written.begin(), written.end(),
                     static_cast<bf16*>(scales) + first * target.k_groups(), to_bf16);
      return;
    }
    case Format::kW8A8Int8: {
      std::vector<bf16> written(static_cast<size_t>(rows));
      w8a8_int8::quantise(w, rows, k, reinterpret_cast<int8_t*>(codes), written.data());
      std::transform(written.begin(), written.end(), static_cast<float*>(scales) + first,
                     [](bf16 s) { return to_float(s); });
      return;
    }
    default:
      CHECK(false, "not a quantised format");
  }
}

}  // namespace

void quantise_rows(const Matrix& source, int64_t begin, int64_t end, Format format,
                   std::byte* codes, void* scales) {
  CHECK(begin % kGroup == 0 && (end % kGroup == 0 || end == source.n), "bands are of 128 rows");
  const Matrix target{.format = format, .n = source.n, .k = source.k};
  std::vector<float> band(static_cast<size_t>(std::min(kGroup, source.n) * source.k));
  for (int64_t first = begin; first < end; first += kGroup) {
    const int64_t rows = std::min(kGroup, end - first);
    for (int64_t r = 0; r < rows; ++r) {
      float* out = band.data() + r * source.k;
      dequantise_row(source, first + r, out);
      if (source.format == Format::kFp8Block)
        std::transform(out, out + source.k, out, round_to_bf16);
    }
    quantise_band(band.data(), first, rows, target, codes, scales);
  }
}

}  // namespace sortie::quant
