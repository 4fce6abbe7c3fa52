#pragma once

#include <cstdint>

#include "backends/cuda/gemm.h"
#include "quant/matrix.h"

// Weights packed for the grouped GEMMs on WGMMA (Layout::kTiles), and what those take.
//
// A matrix is [128 rows of W][128 of K] of tiles, contiguous each, so that a plain bulk copy moves
// one. Rows and K must be multiples of 128; the plain kernel runs other shapes, so which kernel
// runs, and with it the bits, follow from the shape alone.
//
// w4afp8
//
//   | codes, 8 KiB: [half: 64 rows][vector 0, 1][thread 0..127] 16 bytes |
//   | scales, 256 B: [128 rows] bf16, times 2^9                            |
//
// Thread t of a half's warpgroup (warp w, lane 4 g + q) has rows 16 w + 2 g and 16 w + 2 g + 1 of
// the half, called u and v, and of them the k = 32 s + 16 h + 4 q + b, s and b in 0..3, h in 0..1:
// in vector s / 2, word 2 (s % 2) + h. Its byte b holds two codes as sign and magnitude,
//
//   bit    7       6 5 4        3                  2 1 0
//        sign u   |v|     sign v of byte b - 1      |u|       (b - 1 of the word's four, cyclic)
//
// so that the word and the word turned right by four bits, both masked with 0x87 in each byte, are
// four e4m3 each: the codes 0..7 of e4m3 are 0..7 times 2^-9, which the scales make good. -8 has no
// magnitude of three bits and stands as -0, which nothing else uses; it takes a few operations more
// to widen. Behind the matrix's tiles stands a word for each 128 rows: whether they hold a -8.
//
// w8a8_int8
//
//   | codes, 16 KiB: [row r][128 bytes], their 16-byte pieces p at p ^ (r % 8) |
//
// as WGMMA reads them in shared memory; row r is W's row 2 r or 2 (r - 8) + 1 of each 16, so that
// a thread's two sums are neighbours here too. Behind the tiles: the rows' fp32 scales.
namespace sortie::cuda {

constexpr int kTileRows = 128;
constexpr int kTileK = 128;

constexpr int kW4CodeBytes = kTileRows * kTileK / 2;
// A multiple of 128: bulk copies that start within a line of memory are slow.
constexpr int kW4TileBytes = kW4CodeBytes + kTileRows * 2;
static_assert(kW4TileBytes % 128 == 0);
constexpr int kW4TailBytes = 4;

constexpr int kInt8TileBytes = kTileRows * kTileK;
constexpr int kInt8TailBytes = kTileRows * 4;

constexpr int64_t all_tiles_bytes(int64_t n, int64_t k, int64_t tile_bytes) {
  return n / kTileRows * (k / kTileK) * tile_bytes;
}
// Bytes of the packed matrix; 0 = it stays in rows.
constexpr int64_t packed_bytes(const quant::Matrix& m) {
  if (m.n % kTileRows != 0 || m.k % kTileK != 0) return 0;
  const int64_t row_tiles = m.n / kTileRows;
  switch (m.format) {
    case quant::Format::kW4Afp8:
      return all_tiles_bytes(m.n, m.k, kW4TileBytes) + row_tiles * kW4TailBytes;
    case quant::Format::kW8A8Int8:
      return all_tiles_bytes(m.n, m.k, kInt8TileBytes) + row_tiles * kInt8TailBytes;
    default:
      return 0;
  }
}

// A block multiplies two tiles of W with the same tokens: gate's and up's, or two neighbours of one
// matrix, of which the last may stand alone.
constexpr int tile_pairs(int64_t n, int parts) {
  const auto tiles = static_cast<int>(n / kTileRows);
  return parts == 2 ? tiles : (tiles + 1) / 2;
}
constexpr int kTokensOfBlock = 64;
// Columns that the tensor cores are given for so many tokens.
constexpr int token_columns(int tokens) { return tokens <= 16 ? 16 : tokens <= 32 ? 32 : 64; }
constexpr int kMostExperts = 512;  // of a call

// Pairs of tiles, with their tokens, that shared memory holds beside 8 KiB for lists and barriers.
constexpr int stages(int64_t bytes_of_tile) {
  return static_cast<int>((219 << 10) / (2 * bytes_of_tile + kTokensOfBlock * kTileK));
}

// Where the code of row n, column k of a w4afp8 matrix [.., k_total] goes: the byte and the bits in
// it of the magnitude, and of the sign, which may stand in another byte.
struct W4Place {
  int64_t magnitude_byte;
  int magnitude_shift;
  int64_t sign_byte;
  int sign_shift;
};
constexpr int64_t w4_tile_at(int64_t n, int64_t k, int64_t k_total) {
  return (n / kTileRows * (k_total / kTileK) + k / kTileK) * kW4TileBytes;
}
constexpr W4Place w4_place(int64_t n, int64_t k, int64_t k_total) {
  const int64_t half = n % kTileRows / 64;
  const int64_t warp = n % 64 / 16;
  const int64_t g = n % 16 / 2;
  const bool is_v = n % 2 == 1;
  const int64_t s = k % 128 / 32;
  const int64_t h = k % 32 / 16;
  const int64_t q = k % 16 / 4;
  const int64_t b = k % 4;
  const int64_t vector = (half * 2 + s / 2) * 128 + warp * 32 + g * 4 + q;
  const int64_t word = w4_tile_at(n, k, k_total) + vector * 16 + (s % 2 * 2 + h) * 4;
  return {word + b, is_v ? 4 : 0, is_v ? word + (b + 1) % 4 : word + b, is_v ? 3 : 7};
}
constexpr int64_t w4_scale_at(int64_t n, int64_t group, int64_t k_total) {
  return w4_tile_at(n, group * kTileK, k_total) + kW4CodeBytes + n % kTileRows * 2;
}

// Where the code of row n, column k of a w8a8_int8 matrix goes.
constexpr int64_t int8_place(int64_t n, int64_t k, int64_t k_total) {
  const int64_t tile = n / kTileRows * (k_total / kTileK) + k / kTileK;
  const int64_t row = n % kTileRows / 16 * 16 + n % 2 * 8 + n % 16 / 2;
  const int64_t piece = k % kTileK / 16 ^ row % 8;
  return tile * kInt8TileBytes + row * kTileK + piece * 16 + k % 16;
}

// Enqueue the packing of a matrix that lies in rows on the device.
void pack_w4afp8(const quant::Matrix& rows, std::byte* to, void* stream);
void pack_w8a8_int8(const quant::Matrix& rows, std::byte* to, void* stream);
void pack(const quant::Matrix& rows, std::byte* to, void* stream);  // by the format

// Grouped GEMMs over packed matrices.
void sm90_w4afp8(const GemmArgs& a, const ops::Context& c);
void sm90_w8a8_int8(const GemmArgs& a, const ops::Context& c);

}  // namespace sortie::cuda
