#include "backends/cpu/drivers.h"
#include "backends/cpu/test_support.h"

namespace sortie::cpu {
namespace {

using quant::ActFormat;

constexpr ActFormat kQuantised[] = {ActFormat::kE4m3Static, ActFormat::kE4m3Token,
                                    ActFormat::kE4m3Group128, ActFormat::kInt8Token};
constexpr int64_t kWidths[] = {1, 15, 16, 100, 128, 130, 1000, 2048};

// Rows for an op to fill; zero, so that padding compares equal.
struct Output {
  Output(ActFormat format, int64_t count, int64_t k)
      : bytes(count * quant::act_row_bytes(format, k)), memory(bytes + 64) {
    rows = {.format = format,
            .count = count,
            .k = k,
            .data = memory.data(),
            .static_scale = format == ActFormat::kE4m3Static ? 0.013f : 0.0f};
  }
  int64_t bytes;
  Bytes memory;
  quant::Rows rows;
};

class RowOps : public IsaTest {};

// Values of every magnitude, signed zeros, tiny rows and rows that have no scale.
std::vector<float> hard_rows(int64_t count, int64_t k, Random& random) {
  std::vector<float> x = random.normals(count * k);
  for (int64_t t = 0; t < count; ++t) {
    float* row = x.data() + t * k;
    switch (t % 8) {
      case 1:
        for (int64_t i = 0; i < k; ++i)
          row[i] = std::ldexp(row[i], static_cast<int>(random.below(40)) - 30);
        break;
      case 2:
        std::fill_n(row, k, -0.0f);
        break;
      case 3:
        for (int64_t i = 0; i < k; ++i) row[i] *= 0x1p-103f;
        break;
      case 4:
        row[random.below(k)] = kNan;
        break;
      case 5:
        row[random.below(k)] = -std::numeric_limits<float>::infinity();
        break;
      case 6:  // halves: every tie of int8
        for (int64_t i = 0; i < k; ++i) row[i] = static_cast<float>(random.below(255) - 127) / 2;
        row[0] = 127;
        break;
      case 7:
        for (int64_t i = 0; i < k; ++i) row[i] *= 0x1p100f;
        break;
      default:
        break;
    }
  }
  return x;
}

TEST_P(RowOps, QuantiseIsByteEqualToTheDefinition) {
  Random random(5);
  for (const ActFormat format : kQuantised) {
    for (const bool ue8m0 : {false, true}) {
      for (const int64_t k : kWidths) {
        const int64_t count = 17;
        const std::vector<float> x = hard_rows(count, k, random);
        Output expected(format, count, k);
        expected.rows.ue8m0 = ue8m0;
        for (int64_t t = 0; t < count; ++t) quant::quantise_row(x.data() + t * k, expected.rows, t);
        for (int threads = 1; threads <= 3; ++threads) {
          Machine machine(threads);
          Output got(format, count, k);
          got.rows.ue8m0 = ue8m0;
          op().quantise({x.data(), k, got.rows}, machine.context);
          // NaN scales may differ in their payload's sign only; compare as text of bytes otherwise.
          for (int64_t t = 0; t < count; ++t) {
            ASSERT_TRUE(same_bits(got.rows.row(t), expected.rows.row(t), k))
                << static_cast<int>(format) << " k " << k << " row " << t;
            for (int64_t s = 0; s < quant::act_scales(format, k); ++s) {
              const float a = got.rows.scales(t)[s];
              const float b = expected.rows.scales(t)[s];
              ASSERT_TRUE(same_bits(&a, &b, 1) || (std::isnan(a) && std::isnan(b)));
            }
          }
        }
      }
    }
  }
}

// Every float that matters to rounding: all codes' neighbourhoods, by the bits of x / 1.
TEST_P(RowOps, E4m3CodesMatchOnASweepOfAllExponents) {
  std::vector<float> x;
  for (uint32_t high = 0; high < 0x10000; ++high) {
    for (const uint32_t low : {0x0000U, 0x0001U, 0x7fffU, 0x8000U, 0xffffU})
      x.push_back(std::bit_cast<float>(high << 16 | low));
  }
  std::vector<uint8_t> codes(x.size());
  kernels_of(GetParam()).e4m3_codes(x.data(), static_cast<int64_t>(x.size()), 1.0f, codes.data());
  for (size_t i = 0; i < x.size(); ++i) ASSERT_EQ(codes[i], to_e4m3(x[i]).bits) << x[i];
}

TEST_P(RowOps, NormsMatchReference) {
  Random random(6);
  for (const int64_t n : kWidths) {
    for (const int64_t tokens : {0, 1, 5, 40}) {
      const int64_t stride = n + 7;
      const std::vector<float> x = random.normals(tokens * stride);
      const std::vector<float> weight = random.normals(n);
      const ops::NormWeight norm{weight.data(), n, 1e-6f};
      Machine one(1);
      std::vector<float> expected(static_cast<size_t>(tokens * n));
      reference::rms_norm({x.data(), tokens, stride, norm, expected.data(), {}}, one.context);
      for (int threads = 1; threads <= 3; ++threads) {
        Machine machine(threads);
        std::vector<float> y(expected.size());
        op().rms_norm({x.data(), tokens, stride, norm, y.data(), {}}, machine.context);
        EXPECT_LE(relative_error(y, expected), 3e-7) << n;

        // add_rms_norm of a zero residual, and fused quantisation, are the same rows.
        std::vector<float> dense(static_cast<size_t>(tokens * n));
        for (int64_t t = 0; t < tokens; ++t)
          std::copy_n(x.data() + t * stride, n, dense.data() + t * n);
        std::vector<float> residual(dense.size(), 0.0f);
        Output fused(ActFormat::kInt8Token, tokens, n);
        Output separate(ActFormat::kInt8Token, tokens, n);
        op().add_rms_norm({dense.data(), residual.data(), tokens, norm, nullptr, fused.rows},
                          machine.context);
        EXPECT_TRUE(same_bits(residual, dense));
        op().quantise({y.data(), n, separate.rows}, machine.context);
        EXPECT_TRUE(same_bits(fused.rows.data, separate.rows.data, fused.bytes));
        std::vector<float> again(y.size());
        std::fill(residual.begin(), residual.end(), 0.0f);
        op().add_rms_norm({dense.data(), residual.data(), tokens, norm, again.data(), {}},
                          machine.context);
        EXPECT_TRUE(same_bits(again, y));
      }
    }
  }
}

TEST_P(RowOps, SwigluMatchesReferenceAndItsUnfusedForm) {
  Random random(7);
  for (const int64_t n : kWidths) {
    for (const int64_t rows : {0, 1, 9}) {
      std::vector<float> gate_up = random.normals(rows * 2 * n, 4);
      if (rows > 0) {
        gate_up[0] = 200;  // exp(-200) underflows
        gate_up[static_cast<size_t>(n / 2)] = -200;
      }
      Output expected(ActFormat::kF32, rows, n);
      Output got(ActFormat::kF32, rows, n);
      Machine one(1);
      reference::swiglu_quantise({gate_up.data(), rows, n, expected.rows}, one.context);
      Machine machine(2);
      op().swiglu_quantise({gate_up.data(), rows, n, got.rows}, machine.context);
      for (int64_t t = 0; t < rows; ++t) {
        for (int64_t i = 0; i < n; ++i) {
          const float e = expected.rows.f32(t)[i];
          ASSERT_NEAR(got.rows.f32(t)[i], e, 4e-7 * std::abs(e) + 1e-37);
        }
      }
      for (const ActFormat format : kQuantised) {
        Output fused(format, rows, n);
        Output separate(format, rows, n);
        op().swiglu_quantise({gate_up.data(), rows, n, fused.rows}, machine.context);
        for (int64_t t = 0; t < rows; ++t) {
          quant::Rows row = separate.rows;
          row.data = separate.rows.row(t);
          row.count = 1;
          op().quantise({got.rows.f32(t), n, row}, machine.context);
        }
        EXPECT_TRUE(same_bits(fused.rows.data, separate.rows.data, fused.bytes));
      }
    }
  }
}

// exp is seen through softmax: with a largest value of 0 the numerators are exp(x).
TEST_P(RowOps, ExpIsWithinTwoUlpAndHandlesTheEnds) {
  const Kernels& k = kernels_of(GetParam());
  double worst = 0;
  for (int step = 0; step < 200000; step += 63) {
    std::vector<float> s;
    for (int i = 0; i < 63; ++i) s.push_back(-static_cast<float>(step + i) * 104.0f / 200000.0f);
    const std::vector<float> x = s;
    float max = 0;
    float sum = 0;
    k.softmax_block(s.data(), 63, 1.0f, &max, &sum);
    for (size_t i = 0; i < s.size(); ++i) {
      const double exact = std::exp(double{x[i]});
      const double ulp = std::max(std::ldexp(1.0, std::ilogb(exact) - 23), 0x1p-149);
      worst = std::max(worst, std::abs(s[i] - exact) / ulp);
    }
  }
  EXPECT_LE(worst, 1.5);
  std::vector<float> s = {-INFINITY, -200, 0};
  float max = 0;
  float sum = 0;
  EXPECT_EQ(k.softmax_block(s.data(), 3, 1.0f, &max, &sum), 1);
  EXPECT_EQ(s, (std::vector<float>{0, 0, 1}));
  EXPECT_EQ(sum, 1);
  s = {1, kNan, 2};
  k.softmax_block(s.data(), 3, 1.0f, &max, &sum);
  EXPECT_TRUE(std::isnan(sum));
}

TEST_P(RowOps, EmbedRopeAndCacheRowsMatchReference) {
  Random random(8);
  Machine one(1);
  Machine machine(3);
  for (const quant::Format format : {quant::Format::kF32, quant::Format::kBf16}) {
    Weights table(format, 11, 48, random);
    const std::vector<int32_t> ids = {3, 10, 0, 3};
    std::vector<float> expected(4 * 48);
    std::vector<float> got(4 * 48);
    reference::embed({ids.data(), 4, table.matrix, expected.data()}, one.context);
    op().embed({ids.data(), 4, table.matrix, got.data()}, machine.context);
    EXPECT_TRUE(same_bits(got, expected));
  }
  const std::vector<float> cos_sin = random.normals(64 * 16);
  const int64_t tokens = 40;
  std::vector<int32_t> positions;
  for (int64_t t = 0; t < tokens; ++t) positions.push_back(static_cast<int32_t>(random.below(64)));
  std::vector<float> expected = random.normals(tokens * 3 * 30);
  std::vector<float> got = expected;
  reference::rope({expected.data(), tokens, 3, 30, 14, 16, positions.data(), cos_sin.data()},
                  one.context);
  op().rope({got.data(), tokens, 3, 30, 14, 16, positions.data(), cos_sin.data()}, machine.context);
  EXPECT_TRUE(same_bits(got, expected));

  const int64_t lora = 40;
  const std::vector<float> kv = random.normals(tokens * 60);
  const std::vector<float> weight = random.normals(lora);
  std::vector<int32_t> pages(64 / 4);
  for (size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<int32_t>(pages.size() - 1 - i);
  const std::vector<const int32_t*> tables(static_cast<size_t>(tokens), pages.data());
  for (int64_t t = 0; t < tokens; ++t) positions[static_cast<size_t>(t)] = static_cast<int32_t>(t);
  std::vector<float> a(64 * (lora + 16), 5.0f);
  std::vector<float> b = a;
  ops::KvAppend args{.kv = kv.data(),
                     .tokens = tokens,
                     .kv_stride = 60,
                     .norm = {weight.data(), lora, 1e-6f},
                     .rope_dim = 16,
                     .positions = positions.data(),
                     .cos_sin = cos_sin.data(),
                     .page_tables = tables.data(),
                     .cache = {reinterpret_cast<std::byte*>(a.data()), 4, lora + 16}};
  reference::kv_append(args, one.context);
  args.cache.base = reinterpret_cast<std::byte*>(b.data());
  op().kv_append(args, machine.context);
  EXPECT_LE(relative_error(b, a), 3e-7);

  std::vector<bf16> rounded(b.size(), to_bf16(5.0f));
  args.cache.base = reinterpret_cast<std::byte*>(rounded.data());
  args.cache.format = quant::Format::kBf16;
  op().kv_append(args, machine.context);
  for (size_t i = 0; i < b.size(); ++i) ASSERT_EQ(rounded[i].bits, to_bf16(b[i]).bits) << i;
}

INSTANTIATE_TEST_SUITE_P(Isa, RowOps, testing::ValuesIn(all_isas()), isa_parameter);

}  // namespace
}  // namespace sortie::cpu
