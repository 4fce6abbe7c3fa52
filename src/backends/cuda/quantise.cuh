#pragma once

#include "backends/cuda/kernel.cuh"
#include "quant/amax.h"

// One row of values to a row of codes and scales by one block; quant/activations.h defines the
// bits.
namespace sortie::cuda {

// quant::Rows as kernels take it.
struct RowsOut {
  std::byte* data = nullptr;
  int64_t row_bytes = 0;
  int64_t scale_offset = 0;
  int64_t k = 0;
  quant::ActFormat format = quant::ActFormat::kBf16;
  float static_scale = 0;
  bool ue8m0 = false;
};

inline RowsOut rows_out(const quant::Rows& r) {
  return {r.data,         r.row_bytes(), quant::act_scale_offset(r.format, r.k), r.k, r.format,
          r.static_scale, r.ue8m0};
}

// amax / most, or 0 or NaN (quant/amax.h).
__device__ inline float scale_from_bits(uint32_t bits, float most) {
  if (bits >= quant::kInfinityBits) return __uint_as_float(0x7fc00000u);
  const float amax = __uint_as_float(bits);
  return amax < quant::kZeroAmax ? 0.0f : __fdiv_rn(amax, most);
}

// x / d as IEEE division rounds it, without that one's branch, which keeps divisions from running
// beside each other. d is from 2^-60 on; past 2^60, and for quotients that no e4m3 holds or that
// are no numbers, it is x * (1 / d).
__device__ inline float quotient(float x, float d) {
  float r;
  asm("rcp.approx.f32 %0, %1;" : "=f"(r) : "f"(d));
  const float rough = x * r;
  r = fmaf(r, fmaf(-d, r, 1.0f), r);
  float q = x * r;
  q = fmaf(r, fmaf(-d, q, x), q);
  q = fmaf(r, fmaf(-d, q, x), q);
  return d < 0x1p60f && fabsf(rough) < 0x1p60f ? q : rough;
}

__device__ inline float swiglu(float gate, float up) {
  return quotient(gate, 1.0f + expf(-gate)) * up;
}

__device__ inline uint8_t e4m3_scaled(float x, float scale) {
  return scale > 0 ? e4m3_code(__fdiv_rn(x, scale)) : uint8_t{0};
}

__device__ inline float power_of_two_at_or_above(float s) {
  const uint32_t bits = __float_as_uint(s);
  if (!(s > 0) || (bits & 0x7fffffu) == 0) return s;
  return __uint_as_float((bits & 0x7f800000u) + 0x800000u);
}

// value(i) for i in [0, out.k), in fp32; asked for up to twice. `space` is 32 words of shared
// memory. All threads of the block come here together.
template <typename Value>
__device__ void quantise_row(const Value& value, const RowsOut& out, int64_t row, float* space) {
  using quant::ActFormat;
  std::byte* const at = out.data + row * out.row_bytes;
  auto* codes = reinterpret_cast<uint8_t*>(at);
  auto* scales = reinterpret_cast<float*>(at + out.scale_offset);
  const int k = static_cast<int>(out.k);
  const int first = static_cast<int>(threadIdx.x);
  const int step = static_cast<int>(blockDim.x);
  switch (out.format) {
    case ActFormat::kF32:
      for (int i = first; i < k; i += step) reinterpret_cast<float*>(at)[i] = value(i);
      return;
    case ActFormat::kBf16:
      for (int i = first; i < k; i += step) reinterpret_cast<bf16*>(at)[i] = round_bf16(value(i));
      return;
    case ActFormat::kE4m3Static:
      for (int i = first; i < k; i += step) codes[i] = e4m3_scaled(value(i), out.static_scale);
      return;
    case ActFormat::kE4m3Group128: {
      const int lane = first % kWarp;
      for (int g = first / kWarp; g * 128 < k; g += step / kWarp) {
        float v[4];
        uint32_t bits = 0;
        for (int j = 0; j < 4; ++j) {
          const int i = g * 128 + j * kWarp + lane;
          v[j] = i < k ? value(i) : 0.0f;
          bits = max(bits, __float_as_uint(v[j]) & 0x7fffffffu);
        }
        float scale = scale_from_bits(warp_max(bits), kE4m3Max);
        if (out.ue8m0) scale = power_of_two_at_or_above(scale);
        if (lane == 0) scales[g] = scale;
        for (int j = 0; j < 4; ++j) {
          const int i = g * 128 + j * kWarp + lane;
          if (i < k) codes[i] = e4m3_scaled(v[j], scale);
        }
      }
      return;
    }
    case ActFormat::kE4m3Token:
    case ActFormat::kInt8Token: {
      uint32_t bits = 0;
      for (int i = first; i < k; i += step) {
        bits = max(bits, __float_as_uint(value(i)) & 0x7fffffffu);
      }
      bits = block_max(bits, space);
      if (out.format == ActFormat::kE4m3Token) {
        const float scale = scale_from_bits(bits, kE4m3Max);
        if (first == 0) scales[0] = scale;
        for (int i = first; i < k; i += step) codes[i] = e4m3_scaled(value(i), scale);
        return;
      }
      const float scale = scale_from_bits(bits, 127.0f);
      if (first == 0) scales[0] = scale;
      const float multiplier = scale > 0 ? __fdiv_rn(127.0f, __uint_as_float(bits)) : 0.0f;
      for (int i = first; i < k; i += step) {
        codes[i] = multiplier > 0
                       ? static_cast<uint8_t>(static_cast<int8_t>(rintf(value(i) * multiplier)))
                       : uint8_t{0};
      }
      return;
    }
    case ActFormat::kInt8Static:  // upload refuses such weights
      return;
  }
}

}  // namespace sortie::cuda
