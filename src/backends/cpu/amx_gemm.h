#pragma once

#include "backends/cpu/kernels.h"

// gemm on AMX tiles, in plain C++ over `Tiles`: the instructions in amx.cc, an emulation of them in
// amx_test.cc. Weights are the left operand, 16 rows as they lie; activations are the right one,
// packed for each group of channels into [dword of channels][row]. So a weight is never transposed.
//
//   w8a8_int8          TDPBSSD, exact: the sums of every other set
//   fp8_block, w4afp8  TDPBF16PS on codes that are exact in bf16; a group of 128 is summed from
//   zero
//                      in the instruction's order, then folded as docs/numerics.md says
//
// All row counts take this path, since TDPBF16PS adds in an order of its own.
namespace sortie::cpu {
namespace {

using quant::Format;
using quant::kGroup;

constexpr int64_t kTile = 16;         // rows of a tile, and its columns of 4 bytes
constexpr int64_t kTileBytes = 64;    // a row of a tile
constexpr int64_t kPair = 2 * kTile;  // a step multiplies 2 x 2 tiles
constexpr int64_t kBlockColumns = 128;

constexpr uint16_t bf16_of_e4m3(unsigned code) {
  const unsigned sign = (code & 0x80U) << 8;
  const unsigned exponent = (code >> 3) & 15U;
  const unsigned mantissa = code & 7U;
  if ((code & 0x7fU) == 0x7fU) return static_cast<uint16_t>(sign | 0x7fc0U);
  if (exponent != 0)
    return static_cast<uint16_t>(sign | ((exponent + 120U) << 7) | (mantissa << 4));
  if (mantissa == 0) return static_cast<uint16_t>(sign);
  unsigned top = 2;  // subnormal: mantissa * 2^-9
  while ((mantissa >> top) == 0) --top;
  return static_cast<uint16_t>(sign | ((118U + top) << 7) |
                               ((mantissa - (1U << top)) << (7U - top)));
}
struct Bf16Table {
  uint16_t e4m3[256];
  uint16_t int4[16];
};
constexpr Bf16Table make_bf16_table() {
  Bf16Table t{{},
              {0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0,
               0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80}};
  for (unsigned c = 0; c < 256; ++c) t.e4m3[c] = bf16_of_e4m3(c);
  return t;
}
constexpr Bf16Table kBf16 = make_bf16_table();

constexpr bool is_tiled(Format f) {
  return f == Format::kFp8Block || f == Format::kW4Afp8 || f == Format::kW8A8Int8;
}
constexpr int64_t group_count(int64_t k) { return (k + kGroup - 1) / kGroup; }

// Bytes of a group of channels as the tiles take them.
template <Format kFormat>
constexpr int64_t kGroupBytes = kFormat == Format::kW8A8Int8 ? kGroup : 2 * kGroup;

// `channels` codes to a group's bytes; the rest is zero.
template <Format kFormat>
void widen(const std::byte* codes, int64_t channels, std::byte* out) {
  channels = channels < kGroup ? channels : kGroup;
  __builtin_memset(out, 0, static_cast<size_t>(kGroupBytes<kFormat>));
  if (kFormat == Format::kW8A8Int8) {
    __builtin_memcpy(out, codes, static_cast<size_t>(channels));
    return;
  }
  uint16_t bits[kGroup] = {};
  for (int64_t i = 0; i < channels; ++i) {
    if (kFormat == Format::kW4Afp8) {
      const auto byte = static_cast<unsigned>(codes[i / 2]);
      bits[i] = kBf16.int4[i % 2 == 0 ? byte & 15U : byte >> 4];
    } else {
      bits[i] = kBf16.e4m3[static_cast<unsigned>(codes[i])];
    }
  }
  __builtin_memcpy(out, bits, sizeof bits);
}

// Activations are padded to whole groups, e4m3 as bf16.
[[maybe_unused]] int64_t tiles_prepared_bytes(Format format, int64_t k) {
  return group_count(k) * (format == Format::kW8A8Int8 ? kGroup : 2 * kGroup);
}
[[maybe_unused]] void tiles_prepare(Format format, const std::byte* codes, int64_t k,
                                    std::byte* out) {
  for (int64_t g = 0; g < group_count(k); ++g) {
    const std::byte* from = codes + g * kGroup;
    if (format == Format::kW8A8Int8) {
      widen<Format::kW8A8Int8>(from, k - g * kGroup, out + g * kGroup);
    } else {
      widen<Format::kFp8Block>(from, k - g * kGroup, out + 2 * g * kGroup);
    }
  }
}

template <Format kFormat>
struct SumOf {
  using Type = float;
};
template <>
struct SumOf<Format::kW8A8Int8> {
  using Type = int32_t;
};

template <typename Tiles, Format kFormat>
struct TileGemm {
  using Sum = typename SumOf<kFormat>::Type;
  static constexpr bool kInt8 = kFormat == Format::kW8A8Int8;
  static constexpr int64_t kBytes = kGroupBytes<kFormat>;
  static constexpr int64_t kSteps = kBytes / kTileBytes;

  alignas(64) std::byte weights[kSteps][kPair][kTileBytes];
  alignas(64) std::byte rows[kPanelRows / kTile][kSteps][kTile][kTileBytes];
  alignas(64) Sum product[2][2][kTile][kTile];  // [weight tile][row tile]
  float scales[kPair];
  Sum sums[kBlockColumns][kPanelRows];

  // Dword d of a row's step becomes row d of the tile, at the row's place.
  void pack_rows(const Panel& p, int64_t g) {
    __builtin_memset(rows, 0, sizeof rows);
    for (int64_t r = 0; r < p.count; ++r) {
      const std::byte* x = p.rows[r].x + g * kBytes;
      for (int64_t s = 0; s < kSteps; ++s) {
        for (int64_t d = 0; d < kTile; ++d) {
          __builtin_memcpy(&rows[r / kTile][s][d][r % kTile * 4], x + s * kTileBytes + 4 * d, 4);
        }
      }
    }
  }

  // Weight rows from n on, zeros past the panel's end.
  void unpack_weights(const Panel& p, int64_t n, int64_t g) {
    constexpr int64_t kCodeBytes = kFormat == Format::kW4Afp8 ? kGroup / 2 : kGroup;
    for (int64_t m = 0; m < kPair; ++m) {
      std::byte group[kBytes] = {};
      if (n + m < p.n_end) {
        widen<kFormat>(p.w + (n + m) * p.w_stride + g * kCodeBytes, p.k - g * kGroup, group);
        scales[m] = group_scale(p, n + m, g);
      }
      for (int64_t s = 0; s < kSteps; ++s)
        __builtin_memcpy(weights[s][m], group + s * kTileBytes, static_cast<size_t>(kTileBytes));
    }
  }
  static float group_scale(const Panel& p, int64_t n, int64_t g) {
    const int64_t groups = group_count(p.k);
    if (kFormat == Format::kFp8Block)
      return static_cast<const float*>(p.w_scales)[n / kGroup * groups + g];
    if (kFormat == Format::kW4Afp8) {
      const uint32_t bits = static_cast<const uint16_t*>(p.w_scales)[n * groups + g];
      return __builtin_bit_cast(float, bits << 16);
    }
    return 1;
  }

  // The group's products of 32 weight rows and the rows from `first` on, added to the sums.
  void multiply(const Panel& p, int64_t column, int64_t first, int64_t g) {
    const bool both = p.count - first > kTile;
    Tiles::zero();
    for (int64_t s = 0; s < kSteps; ++s) {
      const auto& one = rows[first / kTile][s];
      Tiles::template step<kInt8>(weights[s], one, both ? &rows[first / kTile + 1][s] : nullptr);
    }
    Tiles::store(product);
    for (int64_t m = 0; m < kPair; ++m) {
      for (int64_t r = 0; r < kPair && first + r < p.count; ++r) {
        const Sum value = product[m / kTile][r / kTile][m % kTile][r % kTile];
        Sum& sum = sums[column + m][first + r];
        if constexpr (kInt8) {
          sum += value;
        } else {
          const float scale =
              kFormat == Format::kFp8Block ? p.rows[first + r].scales[g] * scales[m] : scales[m];
          sum = __builtin_fmaf(value, scale, sum);
        }
      }
    }
  }

  void store(const Panel& p, int64_t n, int64_t columns) const {
    for (int64_t r = 0; r < p.count; ++r) {
      const GemmRow& row = p.rows[r];
      for (int64_t j = 0; j < columns; ++j) {
        auto y = static_cast<float>(sums[j][r]);
        if constexpr (kInt8) {
          if (p.sum_bias != nullptr) y = static_cast<float>(sums[j][r] + p.sum_bias[n + j]);
        }
        if (kFormat != Format::kFp8Block) y *= row.scale;
        if (kInt8) y *= static_cast<const float*>(p.w_scales)[n + j];
        row.out[n + j] = y;
      }
    }
  }

  void run(const Panel& p) {
    Tiles::begin();
    for (int64_t n = p.n_begin; n < p.n_end; n += kBlockColumns) {
      const int64_t columns = p.n_end - n < kBlockColumns ? p.n_end - n : kBlockColumns;
      __builtin_memset(sums, 0, sizeof sums);
      for (int64_t g = 0; g < group_count(p.k); ++g) {
        pack_rows(p, g);
        for (int64_t c = 0; c < columns; c += kPair) {
          unpack_weights(p, n + c, g);
          for (int64_t r = 0; r < p.count; r += kPair) multiply(p, c, r, g);
        }
      }
      store(p, n, columns);
    }
    Tiles::end();
  }
};

template <typename Tiles, Format kFormat>
void run_tiles(const Panel& p) {
  TileGemm<Tiles, kFormat> gemm;
  gemm.run(p);
}

template <typename Tiles>
void tiles_gemm(const Panel& p) {
  if (p.format == Format::kW8A8Int8) return run_tiles<Tiles, Format::kW8A8Int8>(p);
  if (p.format == Format::kW4Afp8) return run_tiles<Tiles, Format::kW4Afp8>(p);
  return run_tiles<Tiles, Format::kFp8Block>(p);
}

}  // namespace
}  // namespace sortie::cpu
