#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/scalar.h"

namespace sortie::quant {

// How the weights of one linear are stored.
enum class Format : uint8_t { kF32, kBf16, kFp8Block, kW4Afp8, kW8A8Int8 };

constexpr int64_t kGroup = 128;  // int4 group along K; fp8 block along N and K; activation group

// a >= 0, b > 0; does not overflow for the largest a.
constexpr int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

// The name used by --quantization and in reports.
constexpr std::string_view format_name(Format f) {
  switch (f) {
    case Format::kF32:
      return "f32";
    case Format::kBf16:
      return "bf16";
    case Format::kFp8Block:
      return "fp8_block";
    case Format::kW4Afp8:
      return "w4afp8";
    case Format::kW8A8Int8:
      return "w8a8_int8";
  }
  return "?";
}

// Where codes lie: row by row as described below, or in the tiles that a backend's own kernels want
// (ops::Backend::pack), which nothing else can read.
enum class Layout : uint8_t { kRows, kTiles };

// A weight matrix [n, k], one output channel a row; y = x * W^T. Owns nothing.
//
//   format      codes                              scales
//   kF32        float [n, k]                       -
//   kBf16       bf16 [n, k]                        -
//   kFp8Block   e4m3 [n, k]                        float [ceil(n/128), ceil(k/128)]
//   kW4Afp8     int4 [n, ceil(k/2) bytes]          bf16 [n, ceil(k/128)]
//   kW8A8Int8   int8 [n, k]                        float [n]
//
// Codes are aligned to their scalar and rows are dense; `code_row_bytes` says how far apart.
struct Matrix {
  Format format = Format::kBf16;
  int64_t n = 0;
  int64_t k = 0;
  const std::byte* codes = nullptr;
  const void* scales = nullptr;
  float input_scale = 0;              // kW4Afp8, kW8A8Int8: static activation scale; 0 = per token
  int input_offset = 0;               // kW8A8Int8 with an input_scale: the code that stands for 0
  const int32_t* sum_bias = nullptr;  // kW8A8Int8: [n], added to the integer sums, or null
  bool ue8m0_activations = false;  // kFp8Block: activation scales are rounded up to powers of two
  Layout layout = Layout::kRows;

  constexpr int64_t code_row_bytes() const {
    switch (format) {
      case Format::kF32:
        return k * 4;
      case Format::kBf16:
        return k * 2;
      case Format::kW4Afp8:
        return ceil_div(k, 2);
      default:
        return k;
    }
  }
  constexpr int64_t k_groups() const { return ceil_div(k, kGroup); }
  const std::byte* row(int64_t i) const { return codes + i * code_row_bytes(); }
  const float* f32_scales() const { return static_cast<const float*>(scales); }
  const bf16* bf16_scales() const { return static_cast<const bf16*>(scales); }
  // Bytes of codes and scales together: what a kernel that reads it all must move.
  constexpr int64_t bytes() const {
    int64_t s = 0;
    if (format == Format::kFp8Block) s = ceil_div(n, kGroup) * k_groups() * 4;
    if (format == Format::kW4Afp8) s = n * k_groups() * 2;
    if (format == Format::kW8A8Int8) s = n * 4;
    return n * code_row_bytes() + s;
  }
};

// How a row of activations is stored in memory and on the wire: codes, then its fp32 scales, at
// 4-byte alignment, padded so that rows are 64 bytes apart or a multiple of it.
enum class ActFormat : uint8_t {
  kF32,           // k floats
  kBf16,          // k bf16
  kE4m3Static,    // k codes; one scale for all rows, known to both sides (Rows::static_scale)
  kE4m3Token,     // k codes, 1 scale
  kE4m3Group128,  // k codes, ceil(k/128) scales
  kInt8Token,     // k codes, 1 scale
  kInt8Static,    // k codes, 1 scale: 1, as the weights' scales hold it, or NaN for a bad row
};

// What the linear wants its activations in.
constexpr ActFormat act_format(Format f, bool has_static_scale) {
  switch (f) {
    case Format::kFp8Block:
      return ActFormat::kE4m3Group128;
    case Format::kW4Afp8:
      return has_static_scale ? ActFormat::kE4m3Static : ActFormat::kE4m3Token;
    case Format::kW8A8Int8:
      return has_static_scale ? ActFormat::kInt8Static : ActFormat::kInt8Token;
    default:
      return ActFormat::kF32;
  }
}
inline ActFormat act_format(const Matrix& w) { return act_format(w.format, w.input_scale > 0); }

constexpr int64_t act_scales(ActFormat f, int64_t k) {
  switch (f) {
    case ActFormat::kE4m3Token:
    case ActFormat::kInt8Token:
    case ActFormat::kInt8Static:
      return 1;
    case ActFormat::kE4m3Group128:
      return ceil_div(k, kGroup);
    default:
      return 0;
  }
}
constexpr int64_t act_scale_offset(ActFormat f, int64_t k) {
  if (f == ActFormat::kF32) return k * 4;
  return ceil_div(f == ActFormat::kBf16 ? k * 2 : k, 4) * 4;
}
constexpr int64_t act_row_bytes(ActFormat f, int64_t k) {
  return ceil_div(act_scale_offset(f, k) + act_scales(f, k) * 4, 64) * 64;
}

// Activation rows [count, k] in one ActFormat. Owns nothing; data is 64-byte aligned.
struct Rows {
  ActFormat format = ActFormat::kF32;
  int64_t count = 0;
  int64_t k = 0;
  std::byte* data = nullptr;
  float static_scale = 0;  // kE4m3Static, kInt8Static
  int static_offset = 0;   // kInt8Static
  bool ue8m0 = false;      // kE4m3Group128: scales are powers of two

  int64_t row_bytes() const { return act_row_bytes(format, k); }
  std::byte* row(int64_t i) const { return data + i * row_bytes(); }
  bool plain() const { return format == ActFormat::kF32 || format == ActFormat::kBf16; }
  float* f32(int64_t i) const { return reinterpret_cast<float*>(row(i)); }
  float* scales(int64_t i) const {
    return reinterpret_cast<float*>(row(i) + act_scale_offset(format, k));
  }
};

}  // namespace sortie::quant
