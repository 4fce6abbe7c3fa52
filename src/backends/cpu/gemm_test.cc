#include "backends/cpu/test_support.h"

namespace sortie::cpu {
namespace {

using quant::ActFormat;
using quant::Format;

struct FormatCase {
  const char* name;
  Format format;
  float static_scale;
};
constexpr FormatCase kFormats[] = {
    {"f32", Format::kF32, 0},
    {"bf16", Format::kBf16, 0},
    {"fp8_block", Format::kFp8Block, 0},
    {"w4afp8", Format::kW4Afp8, 0},
    {"w4afp8_static", Format::kW4Afp8, 0.01f},
    {"w8a8", Format::kW8A8Int8, 0},
    {"w8a8_static", Format::kW8A8Int8, 0.02f},
};

class Gemm : public IsaTest {
 protected:
  // Integers must come out the same; fp32 sums within rounding.
  static double tolerance(Format f) { return f == Format::kW8A8Int8 ? 0 : 1e-6; }
};

struct Shape {
  int64_t rows;
  int64_t n;
  int64_t k;
};
// Short last groups, odd sizes, every row tile and more than one panel of rows.
constexpr Shape kShapes[] = {{0, 8, 128},   {1, 1, 1},     {1, 5, 3},     {2, 7, 31},
                             {3, 130, 33},  {4, 6, 127},   {5, 259, 128}, {7, 9, 129},
                             {8, 16, 200},  {13, 3, 1000}, {67, 21, 257}, {1, 64, 2304},
                             {6, 12, 2177}, {130, 4, 64}};

TEST_P(Gemm, LinearMatchesReference) {
  Random random(1);
  for (const FormatCase& f : kFormats) {
    for (const Shape& s : kShapes) {
      SCOPED_TRACE(testing::Message() << f.name << " " << s.rows << "x" << s.n << "x" << s.k);
      Weights w(f.format, s.n, s.k, random);
      w.make_static(f.static_scale);
      Activations x(quant::act_format(w.matrix), s.rows, 2, s.k, random, f.static_scale);
      const std::vector<float> bias = random.normals(s.n);
      const int64_t stride = s.n + 3;
      std::vector<float> expected(static_cast<size_t>(s.rows * stride), 7.0f);
      for (const float* b : {static_cast<const float*>(nullptr), bias.data()}) {
        Machine one(1);
        reference::linear({x.rows, w.matrix, b, expected.data(), stride}, one.context);
        std::vector<float> first;
        for (int threads = 1; threads <= 3; ++threads) {
          Machine machine(threads);
          std::vector<float> y(expected.size(), 7.0f);  // what lies between rows stays
          op().linear({x.rows, w.matrix, b, y.data(), stride}, machine.context);
          EXPECT_LE(relative_error(y, expected), tolerance(f.format));
          if (threads == 1) first = y;
          EXPECT_TRUE(same_bits(y, first)) << threads << " threads";
        }
      }
    }
  }
}

// Weights packed at load give the bits of the same weights in rows.
TEST_P(Gemm, PackedEqualsRows) {
  Random random(5);
  if (op().pack == nullptr) return;  // reads weights in rows
  for (const FormatCase& f : kFormats) {
    for (const Shape& s : kShapes) {
      SCOPED_TRACE(testing::Message() << f.name << " " << s.rows << "x" << s.n << "x" << s.k);
      Weights w(f.format, s.n, s.k, random);
      w.matrix.input_scale = f.static_scale;
      const int64_t bytes = op().packed_bytes(w.matrix);
      if (bytes == 0) continue;
      Bytes codes(bytes);
      op().pack(w.matrix, codes.data());
      quant::Matrix packed = w.matrix;
      packed.layout = quant::Layout::kTiles;
      packed.codes = codes.data();
      if (f.format == Format::kW4Afp8) packed.scales = nullptr;
      EXPECT_EQ(op().packed_bytes(packed), 0);
      Activations x(quant::act_format(w.matrix), s.rows, 2, s.k, random, f.static_scale);
      Machine machine(2);
      std::vector<float> expected(static_cast<size_t>(s.rows * s.n));
      std::vector<float> y(expected.size(), kNan);
      op().linear({x.rows, w.matrix, nullptr, expected.data(), s.n}, machine.context);
      op().linear({x.rows, packed, nullptr, y.data(), s.n}, machine.context);
      EXPECT_TRUE(same_bits(y, expected));
    }
  }
}

// A row's bits depend on nothing but the row: not on how many stand beside it, nor where.
TEST_P(Gemm, RowAloneEqualsRowInBatch) {
  Random random(2);
  for (const FormatCase& f : kFormats) {
    for (const int64_t k : {96, 515, 2200}) {
      SCOPED_TRACE(testing::Message() << f.name << " k " << k);
      const int64_t n = 139;
      const int64_t rows = 135;
      Weights w(f.format, n, k, random);
      w.make_static(f.static_scale);
      Activations x(quant::act_format(w.matrix), rows, 0, k, random, f.static_scale);
      Machine machine(2);
      std::vector<float> alone(static_cast<size_t>(rows * n));
      for (int64_t t = 0; t < rows; ++t) {
        quant::Rows one = x.rows;
        one.data = x.rows.row(t);
        one.count = 1;
        op().linear({one, w.matrix, nullptr, alone.data() + t * n, n}, machine.context);
      }
      for (int64_t count = 1; count <= rows; count += count < 16 ? 1 : 17) {
        for (const int64_t first : {int64_t{0}, rows - count}) {
          quant::Rows some = x.rows;
          some.data = x.rows.row(first);
          some.count = count;
          std::vector<float> y(static_cast<size_t>(count * n));
          op().linear({some, w.matrix, nullptr, y.data(), n}, machine.context);
          ASSERT_TRUE(same_bits(y.data(), alone.data() + first * n, count * n)) << count;
        }
      }
    }
  }
}

// A column's bits do not depend on where it stands in a tile either.
TEST_P(Gemm, ColumnsShiftedEqualColumnsInPlace) {
  Random random(3);
  for (const FormatCase& f : kFormats) {
    SCOPED_TRACE(f.name);
    const int64_t n = 15;
    const int64_t k = 300;
    Weights w(f.format, n, k, random);
    w.make_static(f.static_scale);
    Activations x(quant::act_format(w.matrix), 5, 0, k, random, f.static_scale);
    Machine machine(1);
    std::vector<float> all(static_cast<size_t>(5 * n));
    op().linear({x.rows, w.matrix, nullptr, all.data(), n}, machine.context);
    for (int64_t skip = 1; skip < 6; ++skip) {
      quant::Matrix part = w.matrix;
      part.n = n - skip;
      part.codes = w.matrix.row(skip);
      if (f.format == Format::kW4Afp8)
        part.scales = w.matrix.bf16_scales() + skip * part.k_groups();
      if (f.format == Format::kW8A8Int8) part.scales = w.matrix.f32_scales() + skip;
      if (part.sum_bias != nullptr) part.sum_bias += skip;
      std::vector<float> y(static_cast<size_t>(5 * n), 0.0f);
      op().linear({x.rows, part, nullptr, y.data(), n}, machine.context);
      for (int64_t t = 0; t < 5; ++t) {
        ASSERT_TRUE(same_bits(y.data() + t * n, all.data() + t * n + skip, n - skip)) << skip;
      }
    }
  }
}

struct Experts {
  Experts(const FormatCase& f, int count, int parts, int64_t n, int64_t k, Random& random) {
    for (int i = 0; i < count * parts; ++i) {
      weights.emplace_back(std::make_unique<Weights>(f.format, n, k, random));
      weights.back()->make_static(f.static_scale);
      matrices.push_back(weights.back()->matrix);
    }
  }
  std::vector<std::unique_ptr<Weights>> weights;
  std::vector<quant::Matrix> matrices;
};

// Ragged counts with empty experts, a slot in several lists, slots in none (poison).
TEST_P(Gemm, GroupedMatchesReferenceAndSkipsPoison) {
  Random random(4);
  const std::vector<std::vector<int32_t>> counts = {
      {0, 0, 0}, {1}, {1, 0, 1, 1}, {0, 9, 2, 0, 70}, {3, 3, 4, 1, 0}};
  for (const FormatCase& f : kFormats) {
    for (const auto& count : counts) {
      for (const int parts : {1, 2}) {
        const auto experts = static_cast<int>(count.size());
        const int64_t n = 37;
        const int64_t k = 333;
        SCOPED_TRACE(testing::Message() << f.name << " experts " << experts << " parts " << parts);
        Experts e(f, experts, parts, n, k, random);
        std::vector<int32_t> offsets = {0};
        for (const int32_t c : count) offsets.push_back(offsets.back() + c);
        const int32_t entries = offsets.back();
        const int64_t valid = 20;
        Activations x(quant::act_format(e.matrices[0]), valid, 30, k, random, f.static_scale);
        x.rows.count = valid + 30;
        std::vector<int32_t> index;
        for (int32_t i = 0; i < entries; ++i)
          index.push_back(static_cast<int32_t>(random.below(valid)));
        std::vector<float> expected(static_cast<size_t>(entries * parts * n));
        ops::GroupedGemm args{x.rows, index.data(),   offsets.data(), experts, e.matrices.data(),
                              parts,  expected.data()};
        Machine one(1);
        reference::grouped_gemm(args, one.context);
        std::vector<float> first;
        for (int threads = 1; threads <= 3; ++threads) {
          Machine machine(threads);
          std::vector<float> y(expected.size());
          args.out = y.data();
          op().grouped_gemm(args, machine.context);
          EXPECT_LE(relative_error(y, expected), tolerance(f.format));
          if (threads == 1) first = y;
          EXPECT_TRUE(same_bits(y, first)) << threads << " threads";
        }
        // Each entry equals the linear of its row and expert.
        Machine machine(2);
        for (int32_t i = 0; i < entries; ++i) {
          const auto expert = static_cast<size_t>(
              std::upper_bound(offsets.begin(), offsets.end(), i) - offsets.begin() - 1);
          quant::Rows row = x.rows;
          row.data = x.rows.row(index[static_cast<size_t>(i)]);
          row.count = 1;
          for (int part = 0; part < parts; ++part) {
            std::vector<float> y(static_cast<size_t>(n));
            const auto& m =
                e.matrices[expert * static_cast<size_t>(parts) + static_cast<size_t>(part)];
            op().linear({row, m, nullptr, y.data(), n}, machine.context);
            ASSERT_TRUE(same_bits(y.data(), first.data() + (i * parts + part) * n, n));
          }
        }
      }
    }
  }
}

// Every weight code against every activation code: a table's wrong entry cannot hide in a sum.
TEST_P(Gemm, AllCodesAreExact) {
  Machine machine(1);
  for (const Format format : {Format::kFp8Block, Format::kW4Afp8, Format::kW8A8Int8}) {
    const int codes = format == Format::kW4Afp8 ? 16 : 256;
    for (int place : {0, 1, 2, 3, 62, 65, 127}) {
      const int64_t k = 128;
      Bytes weights(codes * k);
      quant::Matrix w{.format = format, .n = codes, .k = k, .codes = weights.data()};
      std::vector<float> f32_scales(256, 1.0f);
      std::vector<bf16> bf16_scales(256, to_bf16(1.0f));
      w.scales = format == Format::kW4Afp8 ? static_cast<const void*>(bf16_scales.data())
                                           : f32_scales.data();
      const auto weight = [&](int c) {
        if (format == Format::kFp8Block) return to_float(e4m3{static_cast<uint8_t>(c)});
        if (format == Format::kW4Afp8) return static_cast<float>(c < 8 ? c : c - 16);
        return static_cast<float>(static_cast<int8_t>(c));
      };
      for (int c = 0; c < codes; ++c) {
        auto* row = reinterpret_cast<uint8_t*>(weights.data()) + c * w.code_row_bytes();
        if (format == Format::kW4Afp8) {
          row[place / 2] = static_cast<uint8_t>(place % 2 == 0 ? c : c << 4);
        } else {
          row[place] = static_cast<uint8_t>(c);
        }
      }
      const ActFormat act = quant::act_format(w);
      for (const int64_t count : {int64_t{1}, int64_t{256}}) {  // streamed and blocked
        Bytes memory(256 * quant::act_row_bytes(act, k));
        quant::Rows x{.format = act, .count = 256, .k = k, .data = memory.data()};
        for (int a = 0; a < 256; ++a) {
          x.row(a)[place] = static_cast<std::byte>(a);
          x.scales(a)[0] = 1;
        }
        std::vector<float> y(static_cast<size_t>(256 * codes));
        for (int64_t first = 0; first < 256; first += count) {
          quant::Rows some = x;
          some.data = x.row(first);
          some.count = count;
          backend(GetParam())
              .linear({some, w, nullptr, y.data() + first * codes, codes}, machine.context);
        }
        for (int a = 0; a < 256; ++a) {
          const float activation = format == Format::kW8A8Int8
                                       ? static_cast<float>(static_cast<int8_t>(a))
                                       : to_float(e4m3{static_cast<uint8_t>(a)});
          for (int c = 0; c < codes; ++c) {
            const float got = y[static_cast<size_t>(a * codes + c)];
            const float expected = activation * weight(c);
            if (std::isnan(expected)) {
              ASSERT_TRUE(std::isnan(got)) << a << " " << c;
            } else {
              ASSERT_EQ(got, expected) << a << " " << c << " place " << place;
            }
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, Gemm, testing::ValuesIn(all_isas()), isa_parameter);

}  // namespace
}  // namespace sortie::cpu
