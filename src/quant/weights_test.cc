#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "quant/amax.h"
#include "quant/fp8_block.h"
#include "quant/matrix_ops.h"
#include "quant/w4afp8.h"
#include "quant/w8a8_int8.h"

namespace sortie::quant {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<float> normal(int64_t n, float sigma, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> gauss(0, sigma);
  std::vector<float> x(static_cast<size_t>(n));
  for (float& v : x) v = round_to_bf16(gauss(random));
  return x;
}

// A quantised matrix that owns its memory.
struct Owned {
  Owned(const std::vector<float>& w, int64_t n, int64_t k, Format format)
      : codes(static_cast<size_t>(code_bytes(format, n, k))),
        scales(static_cast<size_t>(ceil_div(scale_bytes(format, n, k), 4))) {
    const Matrix source{.format = Format::kF32,
                        .n = n,
                        .k = k,
                        .codes = reinterpret_cast<const std::byte*>(w.data())};
    quantise_rows(source, 0, n, format, codes.data(), scales.data());
    matrix = {.format = format, .n = n, .k = k, .codes = codes.data(), .scales = scales.data()};
  }
  std::vector<float> dequantised() const {
    std::vector<float> out(static_cast<size_t>(matrix.n * matrix.k));
    for (int64_t r = 0; r < matrix.n; ++r) dequantise_row(matrix, r, out.data() + r * matrix.k);
    return out;
  }
  std::vector<std::byte> codes;
  std::vector<float> scales;
  Matrix matrix;
};

constexpr Format kQuantised[] = {Format::kFp8Block, Format::kW4Afp8, Format::kW8A8Int8};

TEST(W4Afp8, All256BytesUnpackToTwoNibbles) {
  for (int byte = 0; byte < 256; ++byte) {
    const auto b = static_cast<uint8_t>(byte);
    const int low = byte % 16 < 8 ? byte % 16 : byte % 16 - 16;
    const int high = byte / 16 < 8 ? byte / 16 : byte / 16 - 16;
    EXPECT_EQ(w4afp8::code_at(&b, 0), low);
    EXPECT_EQ(w4afp8::code_at(&b, 1), high);
    EXPECT_EQ(pack_int4(low, high), b);
    // The two-nibble row through the public form, at scale 0.5.
    const bf16 half = to_bf16(0.5f);
    float out[2];
    w4afp8::dequantise_row(&b, &half, 2, out);
    EXPECT_EQ(out[0], static_cast<float>(low) / 2);
    EXPECT_EQ(out[1], static_cast<float>(high) / 2);
  }
}

TEST(W4Afp8, EvenElementsInTheLowNibble) {
  const float w[4] = {7, -3, 0, 1};
  uint8_t codes[2];
  float scale;
  w4afp8::quantise(w, 1, 4, codes, &scale);
  EXPECT_EQ(scale, 1.0f);
  EXPECT_EQ(codes[0], 0xd7);
  EXPECT_EQ(codes[1], 0x10);
}

TEST(W4Afp8, RoundsHalfToEven) {
  const float w[8] = {7, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -6.5f, 6.5f};
  uint8_t codes[4];
  float scale;
  w4afp8::quantise(w, 1, 8, codes, &scale);
  const int expected[] = {7, 0, 2, 2, 0, -2, -6, 6};
  for (int i = 0; i < 8; ++i) EXPECT_EQ(w4afp8::code_at(codes, i), expected[i]) << i;
}

TEST(W4Afp8, OddKLeavesTheLastHighNibbleZero) {
  const std::vector<float> w = normal(2 * 131, 1, 4);
  uint8_t codes[2 * 66];
  float scales[4];
  w4afp8::quantise(w.data(), 2, 131, codes, scales);
  EXPECT_EQ(codes[65] >> 4, 0);
  EXPECT_EQ(codes[131] >> 4, 0);
  // The last group holds three values; its scale is their amax / 7.
  EXPECT_EQ(scales[1], amax(w.data() + 128, 3) / 7.0f);
  EXPECT_EQ(scales[3], amax(w.data() + 131 + 128, 3) / 7.0f);
}

TEST(W4Afp8, QuantisesWithTheFp32ScaleNotTheRoundedOne) {
  const auto w = normal(128 * 64, 1, 11);
  std::vector<uint8_t> codes(64 * 64);
  std::vector<float> scales(64);
  w4afp8::quantise(w.data(), 64, 128, codes.data(), scales.data());
  int differ = 0;
  for (size_t r = 0; r < 64; ++r) {
    for (size_t c = 0; c < 128; ++c) {
      const int q = w4afp8::code_at(codes.data() + r * 64, static_cast<int64_t>(c));
      EXPECT_EQ(q, static_cast<int>(std::nearbyint(w[r * 128 + c] / scales[r])));
      differ += q != static_cast<int>(std::nearbyint(w[r * 128 + c] / round_to_bf16(scales[r])));
    }
  }
  EXPECT_GT(differ, 0);
}

TEST(W8A8Int8, QuantisesWithTheStoredScale) {
  const auto w = normal(3 * 300, 1, 5);
  std::vector<int8_t> codes(900);
  bf16 scales[3];
  w8a8_int8::quantise(w.data(), 3, 300, codes.data(), scales);
  int clamped = 0;
  for (size_t r = 0; r < 3; ++r) {
    const float largest = amax(w.data() + r * 300, 300);
    EXPECT_EQ(scales[r].bits, to_bf16(largest / 127.0f).bits);
    for (size_t c = 0; c < 300; ++c) {
      const float q = std::nearbyint(w[r * 300 + c] / to_float(scales[r]));
      EXPECT_EQ(codes[r * 300 + c], static_cast<int>(std::fmin(127, std::fmax(-127, q))));
      clamped += std::fabs(q) > 126;
    }
  }
  EXPECT_GE(clamped, 3);
}

TEST(W8A8Int8, ClampsWhereTheScaleWasRoundedDown) {
  // amax / 127 = 1 + 2^-9 + ...: rounded down to 1, so amax / scale exceeds 127.4.
  const float w[2] = {127.4f, -127.4f};
  int8_t codes[2];
  bf16 scale;
  w8a8_int8::quantise(w, 1, 2, codes, &scale);
  EXPECT_EQ(to_float(scale), 1.0f);
  EXPECT_EQ(codes[0], 127);
  EXPECT_EQ(codes[1], -127);
}

TEST(Fp8Block, ShortBlocksHaveTheirOwnScales) {
  std::vector<float> w(130 * 129, 1.0f);
  w[0] = 448;                 // block 0,0
  w[128] = -2;                // block 0,1: one column
  w[129 * 129] = 3;           // block 1,0: two rows
  w[129 * 129 + 128] = 0.5f;  // block 1,1: 2 x 1, beside a 1
  std::vector<uint8_t> codes(w.size());
  float scales[4];
  fp8_block::quantise(w.data(), 130, 129, codes.data(), scales);
  const float expected[] = {1, 2 / 448.0f, 3 / 448.0f, 1 / 448.0f};
  for (int i = 0; i < 4; ++i) EXPECT_EQ(scales[i], expected[i]) << i;
  EXPECT_EQ(fp8_block::row_scales(scales, 129, 129), scales + 2);
  EXPECT_EQ(fp8_block::row_scales(scales, 129, 127), scales);
  EXPECT_EQ(to_float(e4m3{codes[129 * 129 + 128]}), 224);
  EXPECT_EQ(to_float(e4m3{codes[128]}), -448);
  EXPECT_EQ(to_float(e4m3{codes[129]}), 1);
}

TEST(Fp8Block, NegativesThatRoundToZeroArePositiveZero) {
  const float w[3] = {1, -0.0f, -1e-6f};
  uint8_t codes[3];
  float scale;
  fp8_block::quantise(w, 1, 3, codes, &scale);
  EXPECT_EQ(codes[0], 0x7e);
  EXPECT_EQ(codes[1], 0);
  EXPECT_EQ(codes[2], 0);
}

TEST(AllFormats, ZeroAndTinyUnitsAreZeroWithScaleZero) {
  for (Format format : kQuantised) {
    for (float v : {0.0f, -0.0f, 0x1p-101f, -std::numeric_limits<float>::denorm_min()}) {
      const Owned m(std::vector<float>(5, v), 1, 5, format);
      for (std::byte b : m.codes) EXPECT_EQ(b, std::byte{0});
      EXPECT_EQ(m.scales[0], 0.0f);
      for (float w : m.dequantised()) EXPECT_EQ(w, 0.0f);
    }
    const Owned m({0x1p-100f, -0x1p-100f}, 1, 2, format);
    EXPECT_NEAR(m.dequantised()[0], 0x1p-100f, 0x1p-107f);
    EXPECT_NEAR(m.dequantised()[1], -0x1p-100f, 0x1p-107f);
  }
}

TEST(AllFormats, NanAndInfinityShowInTheirUnitAndNowhereElse) {
  for (Format format : kQuantised) {
    for (float bad : {kNan, kInf, -kInf}) {
      std::vector<float> w(2 * 256, 1.0f);
      w[3] = bad;
      const Owned m(w, 2, 256, format);
      const auto back = m.dequantised();
      const bool whole_row = format == Format::kW8A8Int8;
      const bool both_rows = format == Format::kFp8Block;
      for (size_t i = 0; i < 128; ++i) {
        EXPECT_TRUE(std::isnan(back[i]));
        EXPECT_EQ(std::isnan(back[128 + i]), whole_row);
        EXPECT_EQ(std::isnan(back[256 + i]), both_rows);
        EXPECT_FALSE(std::isnan(back[384 + i]));
      }
    }
  }
}

TEST(AllFormats, SizesAndShortShapes) {
  const std::pair<int64_t, int64_t> shapes[] = {{1, 1}, {1, 129}, {129, 1}, {130, 257}, {128, 128}};
  for (const auto& [n, k] : shapes) {
    EXPECT_EQ(code_bytes(Format::kFp8Block, n, k) + scale_bytes(Format::kFp8Block, n, k),
              fp8_block::byte_size(n, k));
    EXPECT_EQ(code_bytes(Format::kW4Afp8, n, k) + scale_bytes(Format::kW4Afp8, n, k),
              w4afp8::byte_size(n, k));
    EXPECT_EQ(code_bytes(Format::kW8A8Int8, n, k) + scale_bytes(Format::kW8A8Int8, n, k),
              w8a8_int8::byte_size(n, k));
    const auto w = normal(n * k, 0.02f, 9);
    for (Format format : kQuantised) {
      const Owned m(w, n, k, format);
      EXPECT_EQ(m.matrix.bytes(), static_cast<int64_t>(m.codes.size()) + scale_bytes(format, n, k));
      const auto back = m.dequantised();
      // Half a step of the coarsest format (amax / 7), and the bf16 rounding of its scale.
      const float bound = amax(w.data(), n * k) / 13.5f;
      for (size_t i = 0; i < w.size(); ++i) EXPECT_NEAR(back[i], w[i], bound);
    }
  }
}

TEST(AllFormats, BandsGiveTheSameBytesAsTheWhole) {
  const int64_t n = 300;
  const int64_t k = 130;
  const auto w = normal(n * k, 0.02f, 10);
  const Matrix source{.format = Format::kF32,
                      .n = n,
                      .k = k,
                      .codes = reinterpret_cast<const std::byte*>(w.data())};
  for (Format format : kQuantised) {
    const Owned whole(w, n, k, format);
    std::vector<std::byte> codes(whole.codes.size());
    std::vector<float> scales(whole.scales.size());
    quantise_rows(source, 128, n, format, codes.data(), scales.data());
    quantise_rows(source, 0, 128, format, codes.data(), scales.data());
    EXPECT_EQ(codes, whole.codes);
    EXPECT_EQ(scales, whole.scales);
  }
}

TEST(AllFormats, Bf16AndFp32SourcesAgreeAndFp8IsRoundedToBf16First) {
  const int64_t n = 128;
  const int64_t k = 128;
  const auto w = normal(n * k, 0.02f, 12);
  std::vector<bf16> narrow(w.size());
  for (size_t i = 0; i < w.size(); ++i) narrow[i] = to_bf16(w[i]);
  const Matrix bf16_source{.format = Format::kBf16,
                           .n = n,
                           .k = k,
                           .codes = reinterpret_cast<const std::byte*>(narrow.data())};
  const Owned fp8(w, n, k, Format::kFp8Block);
  auto rounded = fp8.dequantised();
  for (float& v : rounded) v = round_to_bf16(v);
  for (Format format : {Format::kW4Afp8, Format::kW8A8Int8}) {
    std::vector<std::byte> codes(static_cast<size_t>(code_bytes(format, n, k)));
    std::vector<float> scales(static_cast<size_t>(scale_bytes(format, n, k) / 4));
    quantise_rows(bf16_source, 0, n, format, codes.data(), scales.data());
    EXPECT_EQ(codes, Owned(w, n, k, format).codes);
    quantise_rows(fp8.matrix, 0, n, format, codes.data(), scales.data());
    EXPECT_EQ(codes, Owned(rounded, n, k, format).codes);
    EXPECT_EQ(scales, Owned(rounded, n, k, format).scales);
  }
}

TEST(DequantiseRow, PlainFormatsAreCopied) {
  const float f[4] = {1, -2, 3.5f, kInf};
  const bf16 b[4] = {to_bf16(1), to_bf16(-2), to_bf16(3.5f), to_bf16(kInf)};
  float out[2];
  dequantise_row(
      {.format = Format::kF32, .n = 2, .k = 2, .codes = reinterpret_cast<const std::byte*>(f)}, 1,
      out);
  EXPECT_EQ(out[0], 3.5f);
  EXPECT_EQ(out[1], kInf);
  dequantise_row(
      {.format = Format::kBf16, .n = 2, .k = 2, .codes = reinterpret_cast<const std::byte*>(b)}, 0,
      out);
  EXPECT_EQ(out[0], 1);
  EXPECT_EQ(out[1], -2);
}

// Relative root-mean-square error of Gaussian weights. int4 in groups of 128: a step of amax/7 with
// amax about 2.6 sigma; fp8: e4m3's 3 mantissa bits; int8: a step of amax/127.
TEST(Distortion, StaysWithinTheFormat) {
  const struct {
    Format format;
    double least, most;
  } cases[] = {{Format::kFp8Block, 0.020, 0.030},
               {Format::kW4Afp8, 0.09, 0.13},
               {Format::kW8A8Int8, 0.005, 0.010}};
  const auto w = normal(256 * 1024, 0.02f, 13);
  for (const auto& c : cases) {
    const auto back = Owned(w, 256, 1024, c.format).dequantised();
    double error = 0;
    double power = 0;
    for (size_t i = 0; i < w.size(); ++i) {
      error += std::pow(static_cast<double>(w[i]) - back[i], 2);
      power += std::pow(static_cast<double>(w[i]), 2);
    }
    EXPECT_GE(std::sqrt(error / power), c.least) << format_name(c.format);
    EXPECT_LE(std::sqrt(error / power), c.most) << format_name(c.format);
  }
}

}  // namespace
}  // namespace sortie::quant
