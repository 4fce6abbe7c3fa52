// The plain C++ set, for any processor. 16 partial sums a dot product, so that the order is fixed
// and a compiler may use whatever vectors the target has. Products are rounded before they are
// added: without a hardware fma each would be a library call.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "backends/cpu/kernels.h"
#include "base/scalar.h"
#include "quant/activations.h"
#include "quant/amax.h"

namespace sortie::cpu {
namespace {

using quant::Format;
using quant::kGroup;

constexpr int kLanes = 16;

float lane_sum(float* sum) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) sum[i] += sum[i + width];
  }
  return sum[0];
}

float dot(const float* a, const float* b, int64_t n) {
  float sum[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) sum[lane] += a[i + lane] * b[i + lane];
  }
  for (int lane = 0; i + lane < n; ++lane) sum[lane] += a[i + lane] * b[i + lane];
  return lane_sum(sum);
}

int32_t dot(const int8_t* a, const int8_t* b, int64_t n) {
  int32_t sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += int32_t{a[i]} * b[i];
  return sum;
}

// All e4m3 values.
const std::array<float, 256>& e4m3_values() {
  static const std::array<float, 256> kValues = [] {
    std::array<float, 256> v{};
    for (size_t i = 0; i < v.size(); ++i) v[i] = to_float(e4m3{static_cast<uint8_t>(i)});
    return v;
  }();
  return kValues;
}

void widen_e4m3(const std::byte* codes, int64_t k, float* out) {
  const std::array<float, 256>& values = e4m3_values();
  for (int64_t i = 0; i < k; ++i) out[i] = values[static_cast<size_t>(codes[i])];
}

// The codes of a weight row as floats; fp32 rows are used where they lie.
const float* unpack(const Panel& p, const std::byte* w) {
  float* out = p.scratch;
  switch (p.format) {
    case Format::kBf16: {
      const auto* codes = reinterpret_cast<const bf16*>(w);
      for (int64_t i = 0; i < p.k; ++i) out[i] = to_float(codes[i]);
      return out;
    }
    case Format::kFp8Block:
      widen_e4m3(w, p.k, out);
      return out;
    case Format::kW4Afp8:
      for (int64_t i = 0; i < p.k; i += 2) {
        const auto byte = static_cast<uint8_t>(w[i / 2]);
        out[i] = static_cast<float>(int4_low(byte));
        if (i + 1 < p.k) out[i + 1] = static_cast<float>(int4_high(byte));
      }
      return out;
    default:
      return reinterpret_cast<const float*>(w);
  }
}

// Group sums, each from zero, folded in ascending order.
float dot_groups(const Panel& p, int64_t n, const float* w, const GemmRow& row) {
  const auto* x = reinterpret_cast<const float*>(row.x);
  const int64_t groups = quant::ceil_div(p.k, kGroup);
  const auto* blocks = static_cast<const float*>(p.w_scales) + n / kGroup * groups;
  const auto* scales = static_cast<const bf16*>(p.w_scales) + n * groups;
  const bool fp8 = p.format == Format::kFp8Block;
  float acc = 0;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t k = g * kGroup;
    const float sum = dot(x + k, w + k, std::min(kGroup, p.k - k));
    acc = std::fma(sum, fp8 ? row.scales[g] * blocks[g] : to_float(scales[g]), acc);
  }
  return fp8 ? acc : acc * row.scale;
}

void gemm(const Panel& p) {
  for (int64_t n = p.n_begin; n < p.n_end; ++n) {
    const std::byte* codes = p.w + n * p.w_stride;
    if (p.format == Format::kW8A8Int8) {
      const float scale = static_cast<const float*>(p.w_scales)[n];
      const int32_t bias = p.sum_bias == nullptr ? 0 : p.sum_bias[n];
      for (int64_t r = 0; r < p.count; ++r) {
        const int32_t sum = dot(reinterpret_cast<const int8_t*>(p.rows[r].x),
                                reinterpret_cast<const int8_t*>(codes), p.k);
        p.rows[r].out[n] = (static_cast<float>(sum + bias) * p.rows[r].scale) * scale;
      }
      continue;
    }
    const bool plain = p.format == Format::kF32 || p.format == Format::kBf16;
    const float* w = unpack(p, codes);
    for (int64_t r = 0; r < p.count; ++r) {
      const GemmRow& row = p.rows[r];
      row.out[n] =
          plain ? dot(reinterpret_cast<const float*>(row.x), w, p.k) : dot_groups(p, n, w, row);
    }
  }
}

int64_t prepared_bytes(Format format, int64_t k) {
  return format == Format::kFp8Block || format == Format::kW4Afp8 ? quant::ceil_div(k, 16) * 64 : 0;
}

int32_t prepare(Format /*format*/, const std::byte* codes, int64_t k, std::byte* out) {
  widen_e4m3(codes, k, reinterpret_cast<float*>(out));
  return 0;
}

void accumulate(const Accumulate& p) {
  for (int64_t r = 0; r < p.rows; ++r) {
    float* c = p.c + r * p.c_stride;
    const float factor = p.factor[r];
    for (int64_t i = 0; i < p.columns; ++i) c[i] = factor == 0 ? 0 : c[i] * factor;
    for (int64_t d = 0; d < p.depth; ++d) {
      const float a = p.a[r * p.a_stride + d];
      if (p.b_is_bf16) {
        const auto* b = static_cast<const bf16*>(p.b[d]);
        for (int64_t i = 0; i < p.columns; ++i) c[i] += a * to_float(b[i]);
      } else {
        const auto* b = static_cast<const float*>(p.b[d]);
        for (int64_t i = 0; i < p.columns; ++i) c[i] += a * b[i];
      }
    }
  }
}

float softmax_block(float* s, int64_t n, float scale, float* max, float* sum) {
  float now = *max;
  for (int64_t i = 0; i < n; ++i) {
    s[i] *= scale;
    now = now > s[i] ? now : s[i];
  }
  float lanes[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) lanes[i % kLanes] += s[i] = std::exp(s[i] - now);
  const float kept = std::exp(*max - now);
  *sum = *sum * kept + lane_sum(lanes);
  *max = now;
  return kept;
}

uint32_t amax_bits(const float* x, int64_t n) { return quant::amax_bits(x, n); }

void e4m3_codes(const float* x, int64_t n, float scale, uint8_t* codes) {
  for (int64_t i = 0; i < n; ++i) codes[i] = to_e4m3(x[i] / scale).bits;
}

void int8_codes(const float* x, int64_t n, float multiplier, int8_t* codes) {
  for (int64_t i = 0; i < n; ++i) codes[i] = quant::int8_code(x[i], multiplier);
}

float sum_squares(const float* x, int64_t n) { return dot(x, x, n); }

void norm(const float* x, const float* weight, float scale, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

void silu_mul(const float* gate, const float* up, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
}

void add(const float* x, int64_t n, float* sum) {
  for (int64_t i = 0; i < n; ++i) sum[i] += x[i];
}

void weigh(const float* x, float weight, int64_t n, bool first, float* sum) {
  for (int64_t i = 0; i < n; ++i) sum[i] = first ? weight * x[i] : sum[i] + weight * x[i];
}

uint64_t read(const std::byte* p, int64_t bytes) {
  uint64_t sum[8] = {};
  for (int64_t i = 0; i < bytes; i += 64) {
    for (int64_t j = 0; j < 8; ++j) {
      uint64_t word;
      std::memcpy(&word, p + i + 8 * j, sizeof word);
      sum[j] += word;
    }
  }
  uint64_t total = 0;
  for (const uint64_t s : sum) total += s;
  return total;
}

int64_t multiply(int /*arithmetic*/, int64_t rounds) {
  constexpr int kChains = 32;
  float chain[kChains];
  std::fill_n(chain, kChains, static_cast<float>(rounds));  // unknown to the compiler
  for (int64_t i = 0; i < rounds; ++i) {
    for (float& c : chain) c = c * 0.5f + 0.5f;
  }
  volatile float sink = lane_sum(chain);
  static_cast<void>(sink);
  return rounds * kChains * 2;
}

}  // namespace

const Kernels kGenericKernels = {
    .prepared_bytes = prepared_bytes,
    .prepare = prepare,
    .gemm = gemm,
    .accumulate = accumulate,
    .softmax_block = softmax_block,
    .amax_bits = amax_bits,
    .e4m3_codes = e4m3_codes,
    .int8_codes = int8_codes,
    .sum_squares = sum_squares,
    .norm = norm,
    .silu_mul = silu_mul,
    .add = add,
    .weigh = weigh,
    .read = read,
    .multiply = multiply,
};

}  // namespace sortie::cpu
