#include "backends/reference/dot.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace sortie::reference {

namespace {

using quant::ActFormat;
using quant::Format;
using quant::kGroup;

double sum_of_products(const float* a, const float* b, int64_t begin, int64_t end) {
  double sum = 0;
  for (int64_t k = begin; k < end; ++k) sum += static_cast<double>(a[k]) * b[k];
  return sum;
}

}  // namespace

void weight_codes(const quant::Matrix& w, int64_t row, float* out) {
  const std::byte* codes = w.row(row);
  for (int64_t k = 0; k < w.k; ++k) {
    switch (w.format) {
      case Format::kF32:
        out[k] = reinterpret_cast<const float*>(codes)[k];
        break;
      case Format::kBf16:
        out[k] = to_float(reinterpret_cast<const bf16*>(codes)[k]);
        break;
      case Format::kFp8Block:
        out[k] = to_float(reinterpret_cast<const e4m3*>(codes)[k]);
        break;
      case Format::kW4Afp8: {
        const auto byte = static_cast<uint8_t>(codes[k / 2]);
        out[k] = static_cast<float>(k % 2 == 0 ? int4_low(byte) : int4_high(byte));
        break;
      }
      case Format::kW8A8Int8:
        out[k] = static_cast<float>(reinterpret_cast<const int8_t*>(codes)[k]);
        break;
    }
  }
}

void activation_codes(const quant::Rows& x, int64_t row, float* out) {
  const std::byte* codes = x.row(row);
  for (int64_t k = 0; k < x.k; ++k) {
    switch (x.format) {
      case ActFormat::kF32:
        out[k] = reinterpret_cast<const float*>(codes)[k];
        break;
      case ActFormat::kBf16:
        out[k] = to_float(reinterpret_cast<const bf16*>(codes)[k]);
        break;
      case ActFormat::kInt8Token:
      case ActFormat::kInt8Static:
        out[k] = static_cast<float>(reinterpret_cast<const int8_t*>(codes)[k]);
        break;
      default:
        out[k] = to_float(reinterpret_cast<const e4m3*>(codes)[k]);
        break;
    }
  }
}

float dot(const quant::Matrix& m, int64_t n, const float* w, const quant::Rows& rows, int64_t t,
          const float* x) {
  const int64_t groups = m.k_groups();
  switch (m.format) {
    case Format::kF32:
    case Format::kBf16:
      return static_cast<float>(sum_of_products(w, x, 0, m.k));
    case Format::kW8A8Int8: {
      // Exact: products of int8 and their sums are integers well below 2^53.
      const auto total = static_cast<int32_t>(sum_of_products(w, x, 0, m.k));
      const auto sum = static_cast<float>(total + (m.sum_bias == nullptr ? 0 : m.sum_bias[n]));
      return (sum * rows.scales(t)[0]) * m.f32_scales()[n];
    }
    case Format::kFp8Block: {
      float acc = 0;
      for (int64_t g = 0; g < groups; ++g) {
        const auto sum =
            static_cast<float>(sum_of_products(w, x, g * kGroup, std::min(m.k, (g + 1) * kGroup)));
        const float scale = rows.scales(t)[g] * m.f32_scales()[n / kGroup * groups + g];
        acc = std::fma(sum, scale, acc);
      }
      return acc;
    }
    case Format::kW4Afp8: {
      float acc = 0;
      for (int64_t g = 0; g < groups; ++g) {
        const auto sum =
            static_cast<float>(sum_of_products(w, x, g * kGroup, std::min(m.k, (g + 1) * kGroup)));
        acc = std::fma(sum, to_float(m.bf16_scales()[n * groups + g]), acc);
      }
      return acc * (rows.format == ActFormat::kE4m3Static ? rows.static_scale : rows.scales(t)[0]);
    }
  }
  return 0;
}

}  // namespace sortie::reference
