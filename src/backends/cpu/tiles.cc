#include "backends/cpu/tiles.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace sortie::cpu {

namespace {

using quant::Format;
using quant::kGroup;

constexpr int64_t kInt4GroupBytes = kTileColumns * kGroup / 2;
constexpr int64_t kInt4ScaleBytes = kTileColumns * 2;

// Some bytes of 64 rows, turned: out[b][c] is byte `b` of row c. Rows past `columns` are zero.
constexpr int64_t kTurned = 64;
using Turned = uint8_t[kTurned][kTileColumns];

void turn(const quant::Matrix& w, int64_t first, int64_t columns, int64_t at, int64_t bytes,
          Turned& out) {
  if (bytes < kTurned || columns < kTileColumns) std::memset(out, 0, sizeof out);
  for (int64_t c = 0; c < columns; ++c) {
    const auto* from = reinterpret_cast<const uint8_t*>(w.row(first + c)) + at;
    for (int64_t b = 0; b < bytes; ++b) out[b][c] = from[b];
  }
}

void pack_int8(const Turned& in, uint8_t* out) {
  for (int64_t b = 0; b < kTurned; b += 4) {
    for (int64_t c = 0; c < kTileColumns; ++c) {
      for (int64_t i = 0; i < 4; ++i)
        out[b * kTileColumns + 4 * c + i] = static_cast<uint8_t>(in[b + i][c] ^ 0x80U);
    }
  }
}

void pack_fp8(const Turned& in, uint8_t* out) {
  for (int64_t b = 0; b < kTurned; b += 2, out += 2 * kTileColumns) {
    for (int64_t c = 0; c < kTileColumns; c += 4) {
      uint8_t* to = out + c / 32 * 64 + c / 16 % 2 * 8 + c % 16 * 4;
      for (int64_t i = 0; i < 4; ++i) {
        to[2 * i] = in[b][c + i];
        to[2 * i + 1] = in[b + 1][c + i];
      }
    }
  }
}

// A byte of a row holds two channels: kTurned bytes are a group.
void pack_int4(const Turned& in, uint8_t* out) {
  static_assert(kTurned == kGroup / 2);
  for (int64_t b = 0; b < kTurned; ++b, out += kTileColumns) {
    const uint8_t* v = in[b];
    for (int64_t c = 0; c < 16; ++c) {
      const auto low = [](unsigned x, unsigned y) {
        return static_cast<uint8_t>((x & 15U) | (y & 15U) << 4U);
      };
      const auto high = [](unsigned x, unsigned y) {
        return static_cast<uint8_t>(x >> 4U | (y & 0xf0U));
      };
      out[4 * c] = low(v[c], v[c + 16]);
      out[4 * c + 1] = low(v[c + 32], v[c + 48]);
      out[4 * c + 2] = high(v[c], v[c + 16]);
      out[4 * c + 3] = high(v[c + 32], v[c + 48]);
    }
  }
}

}  // namespace

int64_t tile_bytes(Format format, int64_t k) {
  const int64_t padded = padded_k(k);
  switch (format) {
    case Format::kFp8Block:
    case Format::kW8A8Int8:
      return kTileColumns * padded;
    case Format::kW4Afp8:
      return padded / kGroup * (kInt4GroupBytes + kInt4ScaleBytes);
    default:
      return 0;
  }
}

void pack_tile(const quant::Matrix& w, int64_t tile, std::byte* packed) {
  CHECK(w.layout == quant::Layout::kRows);
  auto* out = reinterpret_cast<uint8_t*>(packed);
  const int64_t first = tile * kTileColumns;
  const int64_t columns = std::min(kTileColumns, w.n - first);
  const int64_t row_bytes = w.code_row_bytes();
  const int64_t padded = w.format == Format::kW4Afp8 ? padded_k(w.k) / 2 : padded_k(w.k);
  alignas(64) Turned turned;
  for (int64_t at = 0; at < padded; at += kTurned) {
    turn(w, first, columns, at, std::clamp<int64_t>(row_bytes - at, 0, kTurned), turned);
    switch (w.format) {
      case Format::kW8A8Int8:
        pack_int8(turned, out);
        break;
      case Format::kFp8Block:
        pack_fp8(turned, out);
        break;
      default:
        pack_int4(turned, out);
        break;
    }
    out += kTurned * kTileColumns;
    if (w.format != Format::kW4Afp8) continue;
    const int64_t group = at / kTurned;
    for (int64_t c = 0; c < kTileColumns; ++c, out += 2) {
      const bf16 scale = c < columns ? w.bf16_scales()[(first + c) * w.k_groups() + group] : bf16{};
      std::memcpy(out, &scale, 2);
    }
  }
}

}  // namespace sortie::cpu
