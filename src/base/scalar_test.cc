#include "base/scalar.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

namespace sortie {
namespace {

TEST(Bf16, All65536ValuesRoundTrip) {
  for (uint32_t i = 0; i < 65536; ++i) {
    const bf16 v{static_cast<uint16_t>(i)};
    const float f = to_float(v);
    if (std::isnan(f)) {
      EXPECT_TRUE(std::isnan(to_float(to_bf16(f))));
    } else {
      EXPECT_EQ(to_bf16(f).bits, v.bits);
    }
  }
}

// Between every two neighbours: the midpoint goes to the even code, anything off it to the nearer.
TEST(Bf16, RoundsHalfToEven) {
  for (uint32_t i = 0; i < 0x7f7f; ++i) {
    const uint32_t mid = (i << 16) | 0x8000u;
    const uint32_t even = (i & 1u) == 0 ? i : i + 1;
    EXPECT_EQ(to_bf16(std::bit_cast<float>(mid)).bits, even);
    EXPECT_EQ(to_bf16(std::bit_cast<float>(mid - 1)).bits, i);
    EXPECT_EQ(to_bf16(std::bit_cast<float>(mid + 1)).bits, i + 1);
    EXPECT_EQ(to_bf16(std::bit_cast<float>(mid | 0x80000000u)).bits, even | 0x8000u);
  }
  EXPECT_EQ(to_bf16(std::numeric_limits<float>::max()).bits, 0x7f80);
}

TEST(E4m3, All256CodesRoundTripAndAreOrdered) {
  float last = -1.0f;
  for (int i = 0; i < 256; ++i) {
    const e4m3 v{static_cast<uint8_t>(i)};
    const float f = to_float(v);
    if ((i & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(f));
      continue;
    }
    EXPECT_EQ(to_e4m3(f).bits, v.bits) << i;
    // The definition: (-1)^s * 2^(e-7) * 1.m, or 2^-6 * 0.m for e = 0.
    const int e = (i >> 3) & 15;
    const int m = i & 7;
    const double expected = e == 0 ? std::ldexp(m / 8.0, -6) : std::ldexp(1 + m / 8.0, e - 7);
    EXPECT_EQ(f, static_cast<float>(i < 128 ? expected : -expected)) << i;
    if (i < 128) {
      EXPECT_GT(f, last);
      last = f;
    }
  }
  EXPECT_EQ(last, kE4m3Max);
}

TEST(E4m3, RoundsHalfToEvenBetweenAllNeighbours) {
  for (int i = 0; i < 0x7e; ++i) {
    const float a = to_float(e4m3{static_cast<uint8_t>(i)});
    const float b = to_float(e4m3{static_cast<uint8_t>(i + 1)});
    const float mid = (a + b) / 2;  // exact: one more mantissa bit
    const int even = (i & 1) == 0 ? i : i + 1;
    EXPECT_EQ(to_e4m3(mid).bits, even);
    EXPECT_EQ(to_e4m3(-mid).bits, even | 0x80);
    EXPECT_EQ(to_e4m3(std::nextafter(mid, 0.0f)).bits, i);
    EXPECT_EQ(to_e4m3(std::nextafter(mid, 1e9f)).bits, i + 1);
  }
}

TEST(E4m3, SaturatesAndKeepsNaN) {
  EXPECT_EQ(to_e4m3(464.0f).bits, 0x7e);  // would be the NaN code without saturation
  EXPECT_EQ(to_e4m3(1e30f).bits, 0x7e);
  EXPECT_EQ(to_e4m3(-std::numeric_limits<float>::infinity()).bits, 0xfe);
  EXPECT_EQ(to_e4m3(std::numeric_limits<float>::quiet_NaN()).bits & 0x7f, 0x7f);
  EXPECT_EQ(to_e4m3(0x1p-11f).bits, 0);
  EXPECT_EQ(to_e4m3(-0.0f).bits, 0x80);
}

TEST(Int4, All256BytesRoundTrip) {
  for (int byte = 0; byte < 256; ++byte) {
    const int low = int4_low(static_cast<uint8_t>(byte));
    const int high = int4_high(static_cast<uint8_t>(byte));
    EXPECT_GE(low, -8);
    EXPECT_LE(low, 7);
    EXPECT_EQ(low & 15, byte & 15);
    EXPECT_EQ(high & 15, byte >> 4);
    EXPECT_EQ(pack_int4(low, high), byte);
  }
}

}  // namespace
}  // namespace sortie
