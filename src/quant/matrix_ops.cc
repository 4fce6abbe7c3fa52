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

void store_plain_row(Format format, const float* x, int64_t n, std::byte* row) {
  CHECK(format == Format::kF32 || format == Format::kBf16, "only plain rows are stored");
  if (format == Format::kF32) {
    std::memcpy(row, x, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  auto* out = reinterpret_cast<bf16*>(row);
  for (int64_t i = 0; i < n; ++i) out[i] = to_bf16(x[i]);
}

namespace {

// `rows` rows, of which `codes` and `scales` hold the first, with the scales as stored.
void quantise_band(const float* w, int64_t rows, int64_t k, Format format, std::byte* codes,
                   void* scales, Rounding rounding = Rounding::kNearest) {
  auto* bytes = reinterpret_cast<uint8_t*>(codes);
  switch (format) {
    case Format::kFp8Block:
      fp8_block::quantise(w, rows, k, bytes, static_cast<float*>(scales));
      return;
    case Format::kW4Afp8:
      (rounding == Rounding::kSearch ? w4afp8::quantise_by_search : w4afp8::quantise)(
          w, rows, k, bytes, static_cast<float*>(scales));
      return;
    case Format::kW8A8Int8:
      w8a8_int8::quantise(w, rows, k, reinterpret_cast<int8_t*>(codes), static_cast<bf16*>(scales));
      return;
    default:
      CHECK(false, "not a quantised format");
  }
}

// Calls fn(first row, rows, their fp32 values) for each 128 rows of [begin, end).
template <typename F>
void for_each_band(const Matrix& source, int64_t begin, int64_t end, F&& fn) {
  CHECK(begin % kGroup == 0 && (end % kGroup == 0 || end == source.n), "bands are of 128 rows");
  std::vector<float> band(static_cast<size_t>(std::min(kGroup, source.n) * source.k));
  for (int64_t first = begin; first < end; first += kGroup) {
    const int64_t rows = std::min(kGroup, end - first);
    for (int64_t r = 0; r < rows; ++r) {
      float* out = band.data() + r * source.k;
      dequantise_row(source, first + r, out);
      if (source.format == Format::kFp8Block) {
        std::transform(out, out + source.k, out, round_to_bf16);
      }
    }
    fn(first, rows, band.data());
  }
}

}  // namespace

void quantise_rows_as_stored(const Matrix& source, int64_t begin, int64_t end, Format format,
                             std::byte* codes, void* scales, Rounding rounding) {
  const int64_t k = source.k;
  for_each_band(source, begin, end, [&](int64_t first, int64_t rows, const float* w) {
    quantise_band(w, rows, k, format, codes + code_bytes(format, first, k),
                  static_cast<std::byte*>(scales) + stored_scale_bytes(format, first, k), rounding);
  });
}

void quantise_rows(const Matrix& source, int64_t begin, int64_t end, Format format,
                   std::byte* codes, void* scales) {
  const int64_t k = source.k;
  std::vector<std::byte> stored(
      static_cast<size_t>(stored_scale_bytes(format, std::min(kGroup, source.n), k)));
  for_each_band(source, begin, end, [&](int64_t first, int64_t rows, const float* w) {
    quantise_band(w, rows, k, format, codes + code_bytes(format, first, k), stored.data());
    std::byte* to = static_cast<std::byte*>(scales) + scale_bytes(format, first, k);
    if (format == Format::kW4Afp8) {
      const auto* wide = reinterpret_cast<const float*>(stored.data());
      std::transform(wide, wide + w4afp8::scale_count(rows, k), reinterpret_cast<bf16*>(to),
                     to_bf16);
    } else if (format == Format::kW8A8Int8) {
      const auto* narrow = reinterpret_cast<const bf16*>(stored.data());
      std::transform(narrow, narrow + rows, reinterpret_cast<float*>(to),
                     [](bf16 s) { return to_float(s); });
    } else {
      std::memcpy(to, stored.data(), static_cast<size_t>(scale_bytes(format, rows, k)));
    }
  });
}

}  // namespace sortie::quant
