#include "quant/activations.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/arena.h"

namespace sortie::quant {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// One quantised row that owns its memory, filled with 0xaa so that unwritten bytes show.
struct Row {
  explicit Row(const std::vector<float>& x, ActFormat format, float static_scale = 0,
               bool ue8m0 = false)
      : k(static_cast<int64_t>(x.size())),
        memory(static_cast<size_t>(act_row_bytes(format, k) + 64), std::byte{0xaa}) {
    const auto address = reinterpret_cast<uintptr_t>(memory.data());
    rows = {.format = format,
            .count = 1,
            .k = k,
            .data = memory.data() + (64 - address % 64) % 64,
            .static_scale = static_scale,
            .ue8m0 = ue8m0};
    quantise_row(x.data(), rows, 0);
  }
  uint8_t code(int64_t i) const { return static_cast<uint8_t>(rows.data[i]); }
  float e4m3_value(int64_t i) const { return to_float(e4m3{code(i)}); }
  int int8_value(int64_t i) const { return static_cast<int8_t>(code(i)); }
  float scale(int64_t i = 0) const { return rows.scales(0)[i]; }

  int64_t k;
  std::vector<std::byte> memory;
  Rows rows;
};

std::vector<float> normal(int64_t n, float sigma, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> gauss(0, sigma);
  std::vector<float> x(static_cast<size_t>(n));
  for (float& v : x) v = gauss(random);
  return x;
}

TEST(RowLayout, OffsetsAndSizes) {
  // codes, then scales at 4-byte alignment, rows a multiple of 64 apart
  EXPECT_EQ(act_scale_offset(ActFormat::kInt8Token, 256), 256);
  EXPECT_EQ(act_row_bytes(ActFormat::kInt8Token, 256), 320);
  EXPECT_EQ(act_scale_offset(ActFormat::kE4m3Token, 5), 8);
  EXPECT_EQ(act_row_bytes(ActFormat::kE4m3Token, 5), 64);
  EXPECT_EQ(act_row_bytes(ActFormat::kE4m3Static, 7168), 7168);
  EXPECT_EQ(act_scales(ActFormat::kE4m3Group128, 7168), 56);
  EXPECT_EQ(act_row_bytes(ActFormat::kE4m3Group128, 7168), 7424);  // 7168 + 224, to 64
  EXPECT_EQ(act_scales(ActFormat::kE4m3Group128, 129), 2);
  EXPECT_EQ(act_row_bytes(ActFormat::kF32, 17), 128);
}

TEST(RowLayout, WritesCodesAndScalesAndNothingElse) {
  const Row row({1, 2, 3, 4, 5}, ActFormat::kInt8Token);
  for (int i = 5; i < 8; ++i) EXPECT_EQ(row.code(i), 0xaa);
  EXPECT_EQ(row.scale(), 5.0f / 127.0f);
  for (int i = 12; i < 64; ++i) EXPECT_EQ(row.code(i), 0xaa);
}

TEST(RowLayout, SecondRowLandsAtItsStride) {
  alignas(64) std::byte memory[128] = {};
  const Rows rows{.format = ActFormat::kInt8Token, .count = 2, .k = 3, .data = memory};
  const float x[3] = {-1, 0.5f, 1};
  quantise_row(x, rows, 1);
  EXPECT_EQ(static_cast<int8_t>(memory[64]), -127);
  EXPECT_EQ(static_cast<int8_t>(memory[65]), 64);  // 63.5 to even
  EXPECT_EQ(rows.scales(1)[0], 1.0f / 127.0f);
  EXPECT_EQ(memory[0], std::byte{0});
}

TEST(Int8Token, RoundsHalfToEven) {
  // amax 127 makes the multiplier 1, so the codes are the values themselves, rounded.
  const Row row({127, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -2.5f, 2.5000002f, 126.5f, -127},
                ActFormat::kInt8Token);
  const int expected[] = {127, 0, 2, 2, 0, -2, -2, 3, 126, -127};
  for (int i = 0; i < 10; ++i) EXPECT_EQ(row.int8_value(i), expected[i]) << i;
  EXPECT_EQ(row.scale(), 1.0f);
}

TEST(Int8Token, IsRneOfXTimes127OverAmax) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    const auto x = normal(513, std::ldexp(1.0f, static_cast<int>(seed) * 9 - 90), seed);
    const Row row(x, ActFormat::kInt8Token);
    float largest = 0;
    for (float v : x) largest = std::max(largest, std::fabs(v));
    EXPECT_EQ(row.scale(), largest / 127.0f);
    for (int64_t i = 0; i < row.k; ++i) {
      const float product = x[static_cast<size_t>(i)] * (127.0f / largest);
      EXPECT_EQ(row.int8_value(i), static_cast<int>(std::nearbyint(product)));
      EXPECT_NE(row.int8_value(i), -128);
    }
  }
}

TEST(Int8Token, LargestFloatsDoNotOverflow) {
  const float most = std::numeric_limits<float>::max();
  const Row row({most, -most, most / 2, 0}, ActFormat::kInt8Token);
  EXPECT_EQ(row.int8_value(0), 127);
  EXPECT_EQ(row.int8_value(1), -127);
  EXPECT_NEAR(row.int8_value(2), 64, 1);
  EXPECT_TRUE(std::isfinite(row.scale()));
}

TEST(E4m3Token, ScaleIsAmaxOver448AndCodesDivideByIt) {
  const auto x = normal(300, 3.0f, 7);
  const Row row(x, ActFormat::kE4m3Token);
  float largest = 0;
  for (float v : x) largest = std::max(largest, std::fabs(v));
  EXPECT_EQ(row.scale(), largest / 448.0f);
  for (int64_t i = 0; i < row.k; ++i) {
    EXPECT_EQ(row.code(i), to_e4m3(x[static_cast<size_t>(i)] / row.scale()).bits);
  }
}

TEST(E4m3Token, RoundsHalfToEven) {
  // amax 448: scale 1. Between 16 and 32 the spacing is 2.
  const Row row({448, 17, 19, -17, -19, 21.000002f}, ActFormat::kE4m3Token);
  const float expected[] = {448, 16, 20, -16, -20, 22};
  for (int i = 0; i < 6; ++i) EXPECT_EQ(row.e4m3_value(i), expected[i]) << i;
}

TEST(E4m3Group128, ShortLastGroupHasItsOwnScale) {
  std::vector<float> x(128 + 3, 1.0f);
  x[5] = -7.0f;
  x[128] = 0.25f;
  x[129] = 0.125f;
  x[130] = -0.5f;
  const Row row(x, ActFormat::kE4m3Group128);
  EXPECT_EQ(row.scale(0), 7.0f / 448.0f);
  EXPECT_EQ(row.scale(1), 0.5f / 448.0f);
  EXPECT_EQ(row.e4m3_value(5), -448);
  EXPECT_EQ(row.e4m3_value(0), 64);
  EXPECT_EQ(row.e4m3_value(128), 224);
  EXPECT_EQ(row.e4m3_value(129), 112);
  EXPECT_EQ(row.e4m3_value(130), -448);
}

TEST(E4m3Group128, Ue8m0ScalesAreTheNextPowerOfTwo) {
  const Row row({448 * 0.75f, 1, 2}, ActFormat::kE4m3Group128, 0, true);
  EXPECT_EQ(row.scale(), 1.0f);
  EXPECT_EQ(row.e4m3_value(0), 336 - 16);  // 336 lies between 320 and 352; even mantissa
  EXPECT_EQ(Row({448}, ActFormat::kE4m3Group128, 0, true).scale(), 1.0f);
  EXPECT_EQ(Row({std::nextafter(448.0f, 449.0f)}, ActFormat::kE4m3Group128, 0, true).scale(), 2.0f);
  for (int e = -90; e < 110; ++e) {
    for (float m : {1.0f, 1.25f, 1.75f, 1.7500001f, 1.9999999f}) {
      const float largest = std::ldexp(m, e);
      const float s = e4m3_scale(largest, true);
      EXPECT_EQ(s, std::exp2(std::ceil(std::log2(static_cast<double>(largest) / 448.0))));
    }
  }
}

TEST(Int8Static, AddsTheOffsetRoundsAndSaturates) {
  Row row({0, 1, 1.5f, -1.5f, 1000, -1000, 1e38f, -1e38f, 0.5f, 0.25f}, ActFormat::kInt8Static,
          0.5f);
  const int plain[] = {0, 2, 3, -3, 127, -128, 127, -128, 1, 0};
  for (int i = 0; i < 10; ++i) EXPECT_EQ(row.int8_value(i), plain[i]) << i;
  EXPECT_EQ(row.scale(), 1.0f);
  row.rows.static_offset = -5;
  const std::vector<float> x = {0, 1, 62, 66.25f, -61.5f, -62, 0.25f, 0.75f, -0.25f, 0};
  quantise_row(x.data(), row.rows, 0);
  // x / 0.5 - 5, halves to even: -4.5 is -4, -3.5 is -4, -5.5 is -6
  const int shifted[] = {-5, -3, 119, 127, -128, -128, -4, -4, -6, -5};
  for (int i = 0; i < 10; ++i) EXPECT_EQ(row.int8_value(i), shifted[i]) << i;
  float back[10];
  dequantise_row(row.rows, 0, back);
  EXPECT_EQ(back[0], 0);
  EXPECT_EQ(back[1], 1);
  for (float bad : {kNan, kInf, -kInf}) {
    const Row spoilt({1, bad}, ActFormat::kInt8Static, 0.5f);
    EXPECT_TRUE(std::isnan(spoilt.scale()));
    EXPECT_EQ(spoilt.code(0), 0);
  }
}

TEST(E4m3Static, SaturatesAndKeepsNan) {
  const Row row({1, -1, 1000, -1000, kInf, -kInf, kNan, 0}, ActFormat::kE4m3Static, 0.5f);
  const float expected[] = {2, -2, 448, -448, 448, -448};
  for (int i = 0; i < 6; ++i) EXPECT_EQ(row.e4m3_value(i), expected[i]) << i;
  EXPECT_TRUE(std::isnan(row.e4m3_value(6)));
  EXPECT_EQ(row.code(7), 0);
}

TEST(ZeroAndTiny, GiveZerosAndScaleZero) {
  const float below = std::nextafter(0x1p-100f, 0.0f);
  for (ActFormat format :
       {ActFormat::kE4m3Token, ActFormat::kE4m3Group128, ActFormat::kInt8Token}) {
    for (float v : {0.0f, -0.0f, below, -below, std::numeric_limits<float>::denorm_min()}) {
      const Row row({v, 0, v}, format);
      EXPECT_EQ(row.scale(), 0.0f);
      EXPECT_FALSE(std::signbit(row.scale()));
      for (int i = 0; i < 3; ++i) EXPECT_EQ(row.code(i), 0);
    }
    const Row row({0x1p-100f, -0x1p-100f}, format);
    EXPECT_GT(row.scale(), 0.0f);
    float out[2];
    dequantise_row(row.rows, 0, out);
    EXPECT_NEAR(out[0], 0x1p-100f, 0x1p-122f);
    EXPECT_EQ(out[1], -out[0]);
  }
}

TEST(NanAndInfinity, PoisonTheirUnitAlone) {
  for (float bad : {kNan, -kNan, kInf, -kInf}) {
    for (ActFormat format : {ActFormat::kE4m3Token, ActFormat::kInt8Token}) {
      const Row row({1, bad, -2}, format);
      EXPECT_TRUE(std::isnan(row.scale()));
      for (int i = 0; i < 3; ++i) EXPECT_EQ(row.code(i), 0);
    }
    std::vector<float> x(256, 1.0f);
    x[200] = bad;
    const Row row(x, ActFormat::kE4m3Group128, 0, true);
    EXPECT_EQ(row.scale(0), 0x1p-8f);
    EXPECT_EQ(row.e4m3_value(0), 256);
    EXPECT_TRUE(std::isnan(row.scale(1)));
    EXPECT_EQ(row.code(128), 0);
  }
}

// Relative root-mean-square error of a Gaussian row: a uniform step of amax/127 (amax about 3.9
// sigma at 4096 values) costs 0.9 %, e4m3's 3 mantissa bits about 2.6 %.
TEST(Distortion, StaysWithinTheFormat) {
  const struct {
    ActFormat format;
    double least, most;
  } cases[] = {{ActFormat::kInt8Token, 0.005, 0.011},
               {ActFormat::kE4m3Token, 0.020, 0.030},
               {ActFormat::kE4m3Group128, 0.020, 0.030},
               {ActFormat::kE4m3Static, 0.020, 0.030},
               {ActFormat::kF32, 0, 0}};
  const auto x = normal(4096, 0.7f, 3);
  for (const auto& c : cases) {
    const Row row(x, c.format, 0.01f);
    std::vector<float> back(x.size());
    dequantise_row(row.rows, 0, back.data());
    double error = 0;
    double power = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      error += std::pow(static_cast<double>(x[i]) - back[i], 2);
      power += std::pow(static_cast<double>(x[i]), 2);
    }
    EXPECT_GE(std::sqrt(error / power), c.least);
    EXPECT_LE(std::sqrt(error / power), c.most);
  }
}

TEST(RoundHalfEven, IsNearbyintOverItsRange) {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> any(-1000, 1000);
  for (int i = 0; i < 100000; ++i) {
    const float x = any(random);
    EXPECT_EQ(round_half_even(x), std::nearbyint(x));
  }
  for (int i = -300; i < 300; ++i) {
    const float x = static_cast<float>(i) + 0.5f;
    EXPECT_EQ(round_half_even(x), std::nearbyint(x));
  }
}

}  // namespace
}  // namespace sortie::quant
