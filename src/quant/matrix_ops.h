#pragma once

#include <cstddef>
#include <cstdint>

#include "quant/matrix.h"

// What can be said of a Matrix of any format. The formats themselves are in their own files.
namespace sortie::quant {

constexpr int64_t code_bytes(Format format, int64_t n, int64_t k) {
  return n * Matrix{.format = format, .n = n, .k = k}.code_row_bytes();
}
// Bytes of the scales in memory, as Matrix describes them.
constexpr int64_t scale_bytes(Format format, int64_t n, int64_t k) {
  return Matrix{.format = format, .n = n, .k = k}.bytes() - code_bytes(format, n, k);
}

// Row `row` in fp32: code * scale, rounded nowhere else. out [k].
void dequantise_row(const Matrix& w, int64_t row, float* out);

// x [n] as a row of kF32 or kBf16.
void store_plain_row(Format format, const float* x, int64_t n, std::byte* row);

// Quantises rows [begin, end) of `source` (kF32, kBf16 or kFp8Block, which is rounded to bf16 on
// the way) into a matrix of `format` whose whole codes and scales are given, in Matrix's form (int4
// scales bf16, int8 scales fp32). begin is a multiple of 128, and end too or the last row. Pieces
// may be made in parallel.
void quantise_rows(const Matrix& source, int64_t begin, int64_t end, Format format,
                   std::byte* codes, void* scales);

// How int4 scales are chosen; the other formats have but one way.
enum class Rounding : uint8_t {
  kNearest,  // amax / 7: the rule of docs/numerics.md
  kSearch,   // the scale of least squared error
};

// The same with the scales as files have them: int4 fp32 [n, ceil(k/128)], int8 bf16 [n, 1].
void quantise_rows_as_stored(const Matrix& source, int64_t begin, int64_t end, Format format,
                             std::byte* codes, void* scales,
                             Rounding rounding = Rounding::kNearest);
constexpr int64_t stored_scale_bytes(Format format, int64_t n, int64_t k) {
  const int64_t in_memory = scale_bytes(format, n, k);
  if (format == Format::kW4Afp8) return in_memory * 2;
  return format == Format::kW8A8Int8 ? in_memory / 2 : in_memory;
}

}  // namespace sortie::quant
