#include "quant/activations.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace sortie::quant {
namespace {

void e4m3_codes(const float* x, int64_t n, float scale, uint8_t* codes) {
  if (!(scale > 0)) {
    std::memset(codes, 0, static_cast<size_t>(n));
    return;
  }
  for (int64_t i = 0; i < n; ++i) codes[i] = to_e4m3(x[i] / scale).bits;
}

void int8_row(const float* x, int64_t n, int8_t* codes, float* scale) {
  const float largest = amax(x, n);
  const float multiplier = int8_multiplier(largest);
  *scale = int8_scale(largest);
  if (multiplier == 0) {  // not through the loop: an infinity times 0 is NaN
    std::memset(codes, 0, static_cast<size_t>(n));
    return;
  }
  for (int64_t i = 0; i < n; ++i) codes[i] = int8_code(x[i], multiplier);
}

void int8_static_row(const float* x, const Rows& out, int8_t* codes, float* scale) {
  CHECK(out.static_scale > 0, "a static activation scale is positive");
  *scale = amax_bits(x, out.k) < kInfinityBits ? 1.0f : kNanScale;
  if (*scale != 1.0f) {
    std::memset(codes, 0, static_cast<size_t>(out.k));
    return;
  }
  const auto offset = static_cast<float>(out.static_offset);
  for (int64_t i = 0; i < out.k; ++i) codes[i] = int8_static_code(x[i], out.static_scale, offset);
}

}  // namespace

void quantise_row(const float* x, const Rows& out, int64_t i) {
  const int64_t k = out.k;
  auto* codes = reinterpret_cast<uint8_t*>(out.row(i));
  float* scales = out.scales(i);
  switch (out.format) {
    case ActFormat::kF32:
      std::memcpy(codes, x, static_cast<size_t>(k) * sizeof(float));
      return;
    case ActFormat::kBf16:
      for (int64_t c = 0; c < k; ++c) reinterpret_cast<bf16*>(codes)[c] = to_bf16(x[c]);
      return;
    case ActFormat::kE4m3Static:
      CHECK(out.static_scale > 0, "a static activation scale is positive");
      e4m3_codes(x, k, out.static_scale, codes);
      return;
    case ActFormat::kE4m3Token:
      scales[0] = e4m3_scale(amax(x, k));
      e4m3_codes(x, k, scales[0], codes);
      return;
    case ActFormat::kE4m3Group128:
      for (int64_t g = 0; g * kGroup < k; ++g) {
        const int64_t begin = g * kGroup;
        const int64_t n = std::min(kGroup, k - begin);
        scales[g] = e4m3_scale(amax(x + begin, n), out.ue8m0);
        e4m3_codes(x + begin, n, scales[g], codes + begin);
      }
      return;
    case ActFormat::kInt8Token:
      int8_row(x, k, reinterpret_cast<int8_t*>(codes), scales);
      return;
    case ActFormat::kInt8Static:
      int8_static_row(x, out, reinterpret_cast<int8_t*>(codes), scales);
      return;
  }
}

void dequantise_row(const Rows& rows, int64_t i, float* out) {
  const auto* codes = reinterpret_cast<const uint8_t*>(rows.row(i));
  const float* scales = rows.scales(i);
  for (int64_t c = 0; c < rows.k; ++c) {
    switch (rows.format) {
      case ActFormat::kF32:
        out[c] = rows.f32(i)[c];
        break;
      case ActFormat::kBf16:
        out[c] = to_float(reinterpret_cast<const bf16*>(codes)[c]);
        break;
      case ActFormat::kE4m3Static:
        out[c] = to_float(e4m3{codes[c]}) * rows.static_scale;
        break;
      case ActFormat::kE4m3Token:
        out[c] = to_float(e4m3{codes[c]}) * scales[0];
        break;
      case ActFormat::kE4m3Group128:
        out[c] = to_float(e4m3{codes[c]}) * scales[c / kGroup];
        break;
      case ActFormat::kInt8Token:
        out[c] = static_cast<float>(static_cast<int8_t>(codes[c])) * scales[0];
        break;
      case ActFormat::kInt8Static:
        out[c] = static_cast<float>(static_cast<int8_t>(codes[c]) - rows.static_offset) *
                 rows.static_scale * scales[0];
        break;
    }
  }
}

}  // namespace sortie::quant
