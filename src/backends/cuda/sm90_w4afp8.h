#pragma once

#include <cstdint>

#include "backends/cuda/gemm.h"
#include "quant/matrix.h"

// The w4afp8 grouped GEMM on WGMMA: which matrices it takes, and how they are arranged for it.
//
// A stage is what the pipeline moves at once: 128 rows of W by 256 of K, contiguous in memory.
//
//   | codes, 16 KiB: [half: 64 rows][group of 128][vector 0, 1][thread 0..127] 16 bytes |
//   | scales, 512 B: [group][128 rows] bf16, times 2^9                                    |
//
// A matrix is [tile of 128 rows][stage of K] of these: as many bytes as codes and scales have
// plain.
//
// Thread t of a half's warpgroup (warp w, lane 4 g + q) has rows 16 w + 2 g and 16 w + 2 g + 1 of
// the half, called u and v, and of each group of 128 the k = 32 s + 16 h + 4 q + b, s and b in
// 0..3, h in 0..1: in vector s / 2, word 2 (s % 2) + h. Its byte b holds two codes as sign and
// magnitude,
//
//   bit    7       6 5 4        3                  2 1 0
//        sign u   |v|     sign v of byte b - 1      |u|       (b - 1 of the word's four, cyclic)
//
// so that the word and the word turned right by four bits, both masked with 0x87 in each byte, are
// four e4m3 each: the codes 0..7 of e4m3 are 0..7 times 2^-9, which the scales make good. -8 has no
// magnitude of three bits; a matrix that holds one is left to the plain kernel.
namespace sortie::cuda {

constexpr int kW4Rows = 128;
constexpr int kW4StageK = 256;
constexpr int kW4CodeBytes = kW4Rows * kW4StageK / 2;
constexpr int kW4ScaleBytes = kW4Rows * (kW4StageK / 128) * 2;
constexpr int kW4StageBytes = kW4CodeBytes + kW4ScaleBytes;

constexpr bool w4_fits(int64_t n, int64_t k) { return n % kW4Rows == 0 && k % kW4StageK == 0; }

// Tokens that a block takes at once, by the most that an expert can have.
constexpr int w4_tokens(int64_t rows) { return rows <= 16 ? 16 : rows <= 32 ? 32 : 64; }
// Stages in flight: what shared memory holds beside 4 KiB for lists and barriers.
constexpr int w4_stages(int tokens) { return (223 << 10) / (kW4StageBytes + tokens * kW4StageK); }

// Where the code of row n, column k of a matrix [.., k_total] goes: the byte, and the bits in it of
// magnitude and sign (the sign may stand in another byte).
struct W4Place {
  int64_t magnitude_byte;
  int magnitude_shift;
  int64_t sign_byte;
  int sign_shift;
};
constexpr W4Place w4_place(int64_t n, int64_t k, int64_t k_total) {
  const int64_t stage = n / kW4Rows * (k_total / kW4StageK) + k / kW4StageK;
  const int64_t half = n % kW4Rows / 64;
  const int64_t group = k % kW4StageK / 128;
  const int64_t warp = n % 64 / 16;
  const int64_t g = n % 16 / 2;
  const bool is_v = n % 2 == 1;
  const int64_t s = k % 128 / 32;
  const int64_t h = k % 32 / 16;
  const int64_t q = k % 16 / 4;
  const int64_t b = k % 4;
  const int64_t thread = warp * 32 + g * 4 + q;
  const int64_t vector = ((half * 2 + group) * 2 + s / 2) * 128 + thread;
  const int64_t word = stage * kW4StageBytes + vector * 16 + (s % 2 * 2 + h) * 4;
  return {word + b, is_v ? 4 : 0, is_v ? word + (b + 1) % 4 : word + b, is_v ? 3 : 7};
}
constexpr int64_t w4_scale_place(int64_t n, int64_t group, int64_t k_total) {
  const int64_t stage = n / kW4Rows * (k_total / kW4StageK) + group / 2;
  return stage * kW4StageBytes + kW4CodeBytes + (group % 2 * kW4Rows + n % kW4Rows) * 2;
}

// Whether the kernel takes these matrices of the host: one shape, format w4afp8, no code -8.
bool w4_can_arrange(const quant::Matrix* host, int64_t count);
// Enqueues the arranging of one matrix of the device at `to`.
void w4_arrange(const quant::Matrix& plain, std::byte* to, void* stream);

// GEMM over arranged matrices.
void sm90_w4afp8_grouped_gemm(const GemmArgs& a, const ops::Context& c);

}  // namespace sortie::cuda
