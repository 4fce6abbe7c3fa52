#pragma once

#include <cstdint>

namespace sortie::cuda {

// Four signed int4, the lower 16 bits of `nibbles` with the first in the lowest, as four e4m3 bytes
// in the same order. All of -8..7 are exact in e4m3: byte permutes look the magnitude bits up in a
// table each for 0..7 and -8..-1, and the sign bit picks between them.
__device__ inline uint32_t e4m3_of_int4(uint32_t nibbles) {
  const uint32_t magnitude = nibbles & 0x7777u;
  const uint32_t positive = __byte_perm(0x44403800u, 0x4e4c4a48u, magnitude);  // 0..3, 4..7
  const uint32_t negative = __byte_perm(0xcaccced0u, 0xb8c0c4c8u, magnitude);  // -8..-5, -4..-1
  const uint32_t sign = __byte_perm(0x0000ff00u, 0u, nibbles >> 3 & 0x1111u);
  return (negative & sign) | (positive & ~sign);
}

}  // namespace sortie::cuda
