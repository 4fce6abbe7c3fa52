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

// 64 bytes of each of a tile's 64 columns: column c's lie at data + c * stride.
constexpr int64_t kPieceBytes = 64;
struct Piece {
  const uint8_t* data;
  int64_t stride;
  template <typename T>
  T at(int64_t column, int64_t byte) const {
    T v;
    std::memcpy(&v, data + column * stride + byte, sizeof v);
    return v;
  }
};

void pack_int8(const Piece& in, uint8_t* out) {
  for (int64_t c = 0; c < kTileColumns; ++c) {
    for (int64_t b = 0; b < kPieceBytes; b += 4) {
      const uint32_t codes = in.at<uint32_t>(c, b) ^ 0x80808080U;
      std::memcpy(out + b * kTileColumns + 4 * c, &codes, sizeof codes);
    }
  }
}

void pack_fp8(const Piece& in, uint8_t* out) {
  for (int64_t c = 0; c < kTileColumns; ++c) {
    uint8_t* to = out + c / 32 * 64 + c / 16 % 2 * 8 + c % 16 / 4 * 16 + c % 4 * 2;
    for (int64_t b = 0; b < kPieceBytes; b += 2) {
      const auto codes = in.at<uint16_t>(c, b);
      std::memcpy(to + b * kTileColumns, &codes, sizeof codes);
    }
  }
}

// A byte of a row holds two channels: a piece is a group. Eight bytes at a time.
void pack_int4(const Piece& in, uint8_t* out) {
  static_assert(kPieceBytes == kGroup / 2);
  constexpr uint64_t kLow = 0x0f0f0f0f0f0f0f0fU;
  for (int64_t c = 0; c < 16; ++c) {
    for (int64_t b = 0; b < kPieceBytes; b += 8) {
      uint64_t v[4];
      for (int64_t i = 0; i < 4; ++i) v[i] = in.at<uint64_t>(c + 16 * i, b);
      const uint64_t word[4] = {
          (v[0] & kLow) | (v[1] & kLow) << 4U, (v[2] & kLow) | (v[3] & kLow) << 4U,
          (v[0] >> 4U & kLow) | (v[1] & ~kLow), (v[2] >> 4U & kLow) | (v[3] & ~kLow)};
      for (int64_t i = 0; i < 8; ++i) {
        uint32_t codes = 0;
        for (unsigned j = 0; j < 4; ++j)
          codes |= static_cast<uint32_t>(word[j] >> (8 * i) & 0xffU) << (8 * j);
        std::memcpy(out + (b + i) * kTileColumns + 4 * c, &codes, sizeof codes);
      }
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
  alignas(64) uint8_t edge[kTileColumns * kPieceBytes];
  for (int64_t at = 0; at < padded; at += kPieceBytes) {
    Piece piece{reinterpret_cast<const uint8_t*>(w.row(first)) + at, row_bytes};
    if (columns < kTileColumns || at + kPieceBytes > row_bytes) {
      std::memset(edge, 0, sizeof edge);
      const auto bytes = static_cast<size_t>(std::clamp<int64_t>(row_bytes - at, 0, kPieceBytes));
      for (int64_t c = 0; bytes > 0 && c < columns; ++c)
        std::memcpy(edge + c * kPieceBytes, w.row(first + c) + at, bytes);
      piece = {edge, kPieceBytes};
    }
    switch (w.format) {
      case Format::kW8A8Int8:
        pack_int8(piece, out);
        break;
      case Format::kFp8Block:
        pack_fp8(piece, out);
        break;
      default:
        pack_int4(piece, out);
        break;
    }
    out += kPieceBytes * kTileColumns;
    if (w.format != Format::kW4Afp8) continue;
    const int64_t group = at / kPieceBytes;
    for (int64_t c = 0; c < kTileColumns; ++c, out += 2) {
      const bf16 scale = c < columns ? w.bf16_scales()[(first + c) * w.k_groups() + group] : bf16{};
      std::memcpy(out, &scale, 2);
    }
  }
}

}  // namespace sortie::cpu
