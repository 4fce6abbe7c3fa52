#pragma once

#include <cstdint>
#include <limits>

// Sums and products of sizes, all at least 0, that stop at the largest int64 instead of wrapping: a
// size that absurd flags or files ask for is then merely too large.
namespace sortie {

constexpr int64_t saturating_add(int64_t a, int64_t b) {
  int64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? std::numeric_limits<int64_t>::max() : sum;
}

template <typename... Factors>
constexpr int64_t saturating_product(int64_t a, int64_t b, Factors... more) {
  int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) product = std::numeric_limits<int64_t>::max();
  if constexpr (sizeof...(more) == 0) {
    return product;
  } else {
    return saturating_product(product, more...);
  }
}

}  // namespace sortie
