// The ops that go row by row: norms, quantisation, SwiGLU, rope, embedding, cache rows.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "backends/cpu/drivers.h"
#include "quant/activations.h"
#include "quant/matrix_ops.h"

namespace sortie::cpu {

namespace {

using quant::ActFormat;
using quant::kGroup;

// fn(t, buffer) for each row, spread over threads; `buffer` has `floats` floats for this thread.
template <typename F>
void each_row(const ops::Context& c, int64_t rows, int64_t n, int64_t floats, const F& fn) {
  Arena::Scope scope(c.scratch);
  floats = quant::ceil_div(floats, 16) * 16;  // no two threads on one cache line
  auto* buffers = c.scratch.alloc<float>(floats * c.threads.size());
  run_shared(c, rows <= 1 ? 0 : rows * n, [&](int thread, int threads) {
    const Share share = share_of(rows, thread, threads);
    for (int64_t t = share.begin; t < share.end; ++t) fn(t, buffers + thread * floats);
  });
}

void norm_row(const float* x, const ops::NormWeight& norm, float* y, const ops::Rows& rows,
              int64_t t, const Kernels& k) {
  const float mean = k.sum_squares(x, norm.n) / static_cast<float>(norm.n);
  k.norm(x, norm.weight, 1.0f / std::sqrt(mean + norm.eps), norm.n, y);
  if (norm.bias != nullptr) k.add(norm.bias, norm.n, y);
  if (rows.data != nullptr) quantise_row(y, rows, t, k);
}

void e4m3_group(const float* x, int64_t n, float scale, uint8_t* codes, const Kernels& k) {
  if (scale > 0) {
    k.e4m3_codes(x, n, scale, codes);
  } else {
    std::memset(codes, 0, static_cast<size_t>(n));
  }
}

float amax(const float* x, int64_t n, const Kernels& k) {
  return quant::amax_from_bits(k.amax_bits(x, n));
}

}  // namespace

void quantise_row(const float* x, const ops::Rows& out, int64_t i, const Kernels& k) {
  auto* codes = reinterpret_cast<uint8_t*>(out.row(i));
  float* scales = out.scales(i);
  switch (out.format) {
    case ActFormat::kF32:
      std::memcpy(codes, x, static_cast<size_t>(out.k) * sizeof(float));
      return;
    case ActFormat::kBf16:
      quant::quantise_row(x, out, i);
      return;
    case ActFormat::kE4m3Static:
      CHECK(out.static_scale > 0, "a static activation scale is positive");
      k.e4m3_codes(x, out.k, out.static_scale, codes);
      return;
    case ActFormat::kE4m3Token:
      scales[0] = quant::e4m3_scale(amax(x, out.k, k));
      e4m3_group(x, out.k, scales[0], codes, k);
      return;
    case ActFormat::kE4m3Group128:
      for (int64_t g = 0; g * kGroup < out.k; ++g) {
        const int64_t begin = g * kGroup;
        const int64_t n = std::min(kGroup, out.k - begin);
        scales[g] = quant::e4m3_scale(amax(x + begin, n, k), out.ue8m0);
        e4m3_group(x + begin, n, scales[g], codes + begin, k);
      }
      return;
    case ActFormat::kInt8Token: {
      const float largest = amax(x, out.k, k);
      const float multiplier = quant::int8_multiplier(largest);
      scales[0] = quant::int8_scale(largest);
      if (multiplier == 0) {  // an infinity times 0 is NaN
        std::memset(codes, 0, static_cast<size_t>(out.k));
      } else {
        k.int8_codes(x, out.k, multiplier, reinterpret_cast<int8_t*>(codes));
      }
      return;
    }
    case ActFormat::kInt8Static:
      quant::quantise_row(x, out, i);
      return;
  }
}

void quantise(const ops::Quantise& a, const ops::Context& c, const Kernels& k) {
  each_row(c, a.out.count, a.out.k, 0,
           [&](int64_t t, float*) { quantise_row(a.x + t * a.x_stride, a.out, t, k); });
}

void rms_norm(const ops::RmsNorm& a, const ops::Context& c, const Kernels& k) {
  const int64_t n = a.norm.n;
  each_row(c, a.tokens, n, a.out == nullptr ? n : 0, [&](int64_t t, float* buffer) {
    const int64_t stride = a.out_stride > 0 ? a.out_stride : n;
    norm_row(a.x + t * a.x_stride, a.norm, a.out == nullptr ? buffer : a.out + t * stride,
             a.quantised, t, k);
  });
}

void add_rms_norm(const ops::AddRmsNorm& a, const ops::Context& c, const Kernels& k) {
  const int64_t n = a.norm.n;
  each_row(c, a.tokens, n, a.out == nullptr ? n : 0, [&](int64_t t, float* buffer) {
    float* residual = a.residual + t * n;
    if (a.starts) {
      std::copy_n(a.x + t * n, n, residual);
    } else {
      k.add(a.x + t * n, n, residual);
    }
    norm_row(residual, a.norm, a.out == nullptr ? buffer : a.out + t * n, a.quantised, t, k);
  });
}

void swiglu_quantise(const ops::SwigluQuantise& a, const ops::Context& c, const Kernels& k) {
  const bool plain = a.out.format == ActFormat::kF32;
  each_row(c, a.rows, a.n, plain ? 0 : a.n, [&](int64_t t, float* buffer) {
    const float* gate = a.gate_up + t * 2 * a.n;
    float* h = plain ? a.out.f32(t) : buffer;
    k.silu_mul(gate, gate + a.n, a.n, h);
    if (!plain) quantise_row(h, a.out, t, k);
  });
}

void rope(const ops::Rope& a, const ops::Context& c, const Kernels& /*kernels*/) {
  each_row(c, a.tokens, a.heads * a.dim, 0, [&](int64_t t, float*) {
    const float* cos_sin = a.cos_sin + int64_t{a.positions[t]} * a.dim;
    for (int64_t h = 0; h < a.heads; ++h) {
      float* x = a.x + (t * a.heads + h) * a.head_stride + a.offset;
      for (int64_t i = 0; i < a.dim; i += 2) {
        const float even = x[i];
        const float odd = x[i + 1];
        x[i] = even * cos_sin[i] - odd * cos_sin[i + 1];
        x[i + 1] = odd * cos_sin[i] + even * cos_sin[i + 1];
      }
    }
  });
}

void kv_append(const ops::KvAppend& a, const ops::Context& c, const Kernels& k) {
  const bool rounds = a.cache.format != quant::Format::kF32;
  each_row(c, a.tokens, a.cache.width, rounds ? a.cache.width : 0, [&](int64_t t, float* space) {
    const float* kv = a.kv + t * a.kv_stride;
    const int64_t position = a.positions[t];
    std::byte* cached =
        a.cache.row(a.page_tables[t][position / a.cache.page_size], position % a.cache.page_size);
    float* row = rounds ? space : reinterpret_cast<float*>(cached);
    norm_row(kv, a.norm, row, {}, t, k);
    const float* cos_sin = a.cos_sin + position * a.rope_dim;
    const float* from = kv + a.norm.n;
    float* key = row + a.norm.n;
    for (int64_t i = 0; i < a.rope_dim; i += 2) {
      key[i] = from[i] * cos_sin[i] - from[i + 1] * cos_sin[i + 1];
      key[i + 1] = from[i + 1] * cos_sin[i] + from[i] * cos_sin[i + 1];
    }
    if (rounds) quant::store_plain_row(a.cache.format, row, a.cache.width, cached);
  });
}

void embed(const ops::Embed& a, const ops::Context& c, const Kernels& /*kernels*/) {
  const int64_t n = a.table.k;
  each_row(c, a.tokens, n, 0, [&](int64_t t, float*) {
    CHECK(a.ids[t] >= 0 && a.ids[t] < a.table.n);
    const std::byte* row = a.table.row(a.ids[t]);
    float* out = a.out + t * n;
    if (a.table.format == quant::Format::kF32) {
      std::memcpy(out, row, static_cast<size_t>(n) * sizeof(float));
    } else {
      const auto* codes = reinterpret_cast<const bf16*>(row);
      for (int64_t i = 0; i < n; ++i) out[i] = to_float(codes[i]);
    }
  });
}

}  // namespace sortie::cpu
