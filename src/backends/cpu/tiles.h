#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cpu/kernels.h"

// Weights packed for kernels whose vector lanes are output columns: then a lane's sum is an
// output's, and nothing is added across lanes. A matrix [n, k] becomes ceil(n / 64) tiles, one
// after the other, each one sequential stream. What is past n or k is zero.
//
//   kW8A8Int8   for each 4 channels: 64 columns x 4 codes, each + 128 (unsigned, as vpdpbusd wants)
//   kFp8Block   for each 2 channels: 64 columns x 2 codes, as below
//   kW4Afp8     for each 128 channels: 64 x [2 channels of 64 columns, 64 bytes], then the 64 bf16
//               scales of the group. 16-bit word 2 * (c % 16) + channel % 2, nibble c / 16.
//
// fp8_block's 2 x 64 codes stand so that widening by unpack-low and unpack-high gives the columns
// of one vector: columns 32h + 16v + 4q + i, channel parity p, at byte 64h + 16q + 8v + 2i + p.
// Scales of kFp8Block and kW8A8Int8 stay where they are.
namespace sortie::cpu {

// k in whole groups of 128.
constexpr int64_t padded_k(int64_t k) {
  return (k + quant::kGroup - 1) / quant::kGroup * quant::kGroup;
}

// Tile `tile` of a matrix in rows.
void pack_tile(const quant::Matrix& w, int64_t tile, std::byte* out);

}  // namespace sortie::cpu
