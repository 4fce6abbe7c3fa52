// Every op against the reference, on inputs that are exact in bf16.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "backends/cuda/device_test_support.h"
#include "exchange/gpu.h"
#include "quant/activations.h"

namespace sortie::cuda {
namespace {

using cpu::relative_error;
using cpu::same_bits;
using quant::ActFormat;
using quant::Format;

constexpr double kExact = 1e-5;    // fp32 sums of exact inputs
constexpr double kFp8Sums = 5e-4;  // tensor cores' fp8 sums, before rounding
constexpr double kBf16 = 5e-3;     // rounded to bf16

constexpr std::array<Format, 5> kFormats = {Format::kF32, Format::kBf16, Format::kFp8Block,
                                            Format::kW4Afp8, Format::kW8A8Int8};

double tolerance(Format f) {
  return f == Format::kFp8Block || f == Format::kW4Afp8 ? kFp8Sums : kExact;
}

std::string name_of(Format f) { return std::string(quant::format_name(f)); }

// Rows on the host and their bytes.
struct HostRows {
  HostRows(ops::Rows form, Random& random)
      : memory(std::max<int64_t>(form.count, 1) * form.row_bytes()) {
    rows = form;
    rows.data = memory.data();
    for (int64_t i = 0; i < rows.count; ++i) {
      const std::vector<float> x = bf16_normals(random, rows.k);
      quant::quantise_row(x.data(), rows, i);
    }
  }
  cpu::Bytes memory;
  ops::Rows rows;
};

using Linear = OnGpu;

TEST_F(Linear, MatchesTheReferenceInEveryFormatAndShape) {
  Random random(1);
  struct Shape {
    int64_t n, k;
  };
  for (const Format format : kFormats) {
    for (const Shape s : {Shape{16, 128}, {40, 64}, {7, 72}, {136, 300}, {300, 1024}, {64, 2176}}) {
      if (format == Format::kW4Afp8 && s.k % 2 != 0) continue;
      for (const bool with_scale : {false, true}) {
        if (with_scale && format != Format::kW4Afp8) continue;
        cpu::Weights w(format, s.n, s.k, random);
        if (with_scale) w.matrix.input_scale = 0.0078125f;
        const ops::Matrix matrix = up_matrix(w.matrix);
        const std::vector<float> bias = random.normals(s.n);
        for (const int64_t tokens : {0, 1, 5, 16, 23, 70}) {
          HostRows x(row_form(w.matrix, tokens), random);
          std::vector<float> expected(static_cast<size_t>(tokens * s.n));
          reference::linear({x.rows, w.matrix, bias.data(), expected.data(), s.n}, host.context);
          const ops::Rows rows = up_rows(x.rows);
          float* y32 = fresh<float>(tokens * s.n + 1);
          bf16* y16 = fresh<bf16>(tokens * s.n + 1);
          op().linear_f32({rows, matrix, up(bias), y32, s.n}, context());
          op().linear({rows, matrix, up(bias), y16, s.n}, context());
          const std::vector<float> got = floats(y32, tokens * s.n);
          const std::string what = name_of(format) + " " + std::to_string(s.n) + "x" +
                                   std::to_string(s.k) + " tokens " + std::to_string(tokens);
          EXPECT_LT(relative_error(got, expected), tolerance(format)) << what;
          EXPECT_LT(relative_error(floats(y16, tokens * s.n), expected), kBf16) << what;
          if (format == Format::kW8A8Int8) {
            EXPECT_TRUE(same_bits(got, expected)) << what;
          }
          EXPECT_TRUE(std::isnan(floats(y32 + tokens * s.n, 1)[0])) << what;

          // A row alone gives the same bits as among others, whatever tile that takes.
          for (int64_t t = 0; t < tokens; t += 11) {
            ops::Rows one = rows;
            one.count = 1;
            one.data += t * rows.row_bytes();
            float* y = fresh<float>(s.n);
            op().linear_f32({one, matrix, up(bias), y, s.n}, context());
            const std::vector<float> alone = floats(y, s.n);
            EXPECT_TRUE(same_bits(alone.data(), got.data() + t * s.n, s.n)) << what;
          }
        }
        clear();
      }
    }
  }
}

TEST_F(OnGpu, GroupedGemmGathersRowsForRaggedLists) {
  Random random(2);
  for (const Format format : kFormats) {
    for (const int parts : {1, 2}) {
      for (const int64_t k : {128, 200, 1280}) {
        const int experts = 5;
        const int64_t n = 48;
        const int64_t slots = 40;
        std::vector<cpu::Weights> w;
        for (int i = 0; i < experts * parts; ++i) w.emplace_back(format, n, k, random);
        std::vector<ops::Matrix> matrices;
        const int64_t code_bytes = quant::code_bytes(format, n, k);
        const int64_t scale_bytes = quant::scale_bytes(format, n, k);
        std::vector<std::byte> codes(static_cast<size_t>(code_bytes) * w.size());
        std::vector<std::byte> scales(static_cast<size_t>(scale_bytes) * w.size() + 1);
        for (size_t i = 0; i < w.size(); ++i) {
          matrices.push_back(w[i].matrix);
          std::memcpy(codes.data() + i * static_cast<size_t>(code_bytes), w[i].matrix.codes,
                      static_cast<size_t>(code_bytes));
          std::memcpy(scales.data() + i * static_cast<size_t>(scale_bytes), w[i].matrix.scales,
                      static_cast<size_t>(scale_bytes));
        }
        std::vector<ops::Matrix> on_device = matrices;
        const std::byte* device_codes = up(codes);
        const std::byte* device_scales = up(scales);
        for (size_t i = 0; i < w.size(); ++i) {
          on_device[i].codes = device_codes + static_cast<int64_t>(i) * code_bytes;
          on_device[i].scales = device_scales + static_cast<int64_t>(i) * scale_bytes;
        }
        // 0, 1 and many rows; slot 3 and those from 30 on are in no list.
        const std::vector<int32_t> offsets = {0, 0, 1, 38, 38, 41};
        std::vector<int32_t> index;
        for (int i = 0; i < offsets.back(); ++i) {
          const auto slot = static_cast<int32_t>(random.below(30));
          index.push_back(slot == 3 ? 4 : slot);
        }
        HostRows x(row_form(w[0].matrix, slots), random);
        for (const int64_t slot : {int64_t{3}, int64_t{30}, slots - 1}) {
          std::memset(x.rows.row(slot), 0xff, static_cast<size_t>(x.rows.row_bytes()));
        }
        const int64_t results = offsets.back() * parts * n;
        std::vector<float> expected(static_cast<size_t>(results));
        reference::grouped_gemm({x.rows, index.data(), offsets.data(), experts, matrices.data(),
                                 parts, expected.data()},
                                host.context);
        const ops::Rows rows = up_rows(x.rows);
        float* y32 = fresh<float>(results);
        bf16* y16 = fresh<bf16>(results);
        op().grouped_gemm_f32({rows, up(index), up(offsets), experts, on_device.data(), parts, y32},
                              context());
        op().grouped_gemm({rows, up(index), up(offsets), experts, on_device.data(), parts, y16},
                          context());
        const std::string what = name_of(format) + " k " + std::to_string(k);
        const std::vector<float> got = floats(y32, results);
        EXPECT_LT(relative_error(got, expected), tolerance(format)) << what;
        EXPECT_LT(relative_error(floats(y16, results), expected), kBf16) << what;
        if (format == Format::kW8A8Int8) {
          EXPECT_TRUE(same_bits(got, expected)) << what;
        }
        clear();
      }
    }
  }
}

// Codes at most one away and few of them, scales within rounding.
void expect_close_codes(const ops::Rows& got, const ops::Rows& expected, const std::string& what) {
  int64_t different = 0;
  for (int64_t i = 0; i < expected.count; ++i) {
    for (int64_t s = 0; s < quant::act_scales(expected.format, expected.k); ++s) {
      EXPECT_NEAR(got.scales(i)[s], expected.scales(i)[s], 1e-2f * expected.scales(i)[s]) << what;
    }
    for (int64_t c = 0; c < expected.k; ++c) {
      const auto a = static_cast<int8_t>(got.row(i)[c]);
      const auto b = static_cast<int8_t>(expected.row(i)[c]);
      if (a == b) continue;
      ++different;
      EXPECT_LE(std::abs(a - b), 1) << what << " row " << i << " column " << c;
    }
  }
  EXPECT_LE(different, expected.count * expected.k / 100 + 1) << what;
}

// Experts' matrices in rows on the host and packed on the device.
struct PackedExperts {
  std::vector<cpu::Weights> host;
  std::vector<ops::Matrix> in_rows;
  std::vector<ops::Matrix> packed;
};

class PackedGemm : public OnGpu {
 protected:
  PackedExperts experts(Format format, int count, int64_t n, int64_t k, float static_scale,
                        Random& random) {
    PackedExperts w;
    for (int i = 0; i < count; ++i) {
      cpu::Weights& one = w.host.emplace_back(format, n, k, random);
      one.matrix.input_scale = static_scale;
      // Some tiles hold int4's -8, most do not.
      if (format == Format::kW4Afp8) {
        for (int64_t j = 0; j < 3; ++j) {
          one.codes.data()[random.below(quant::code_bytes(format, n, k))] = std::byte{0x85};
        }
      }
    }
    const int64_t bytes = quant::ceil_div(device().packed_bytes(w.host[0].matrix), 256) * 256;
    auto* to = fresh<std::byte>(bytes * count);
    for (const cpu::Weights& one : w.host) {
      w.in_rows.push_back(one.matrix);
      device().pack(up_matrix(one.matrix), to, context().stream);
      ops::Matrix& m = w.packed.emplace_back(one.matrix);
      m.codes = to;
      m.scales = nullptr;
      m.layout = quant::Layout::kTiles;
      to += bytes;
    }
    return w;
  }
};

// Shapes that WGMMA takes (an odd number of tiles, one of K), ragged lists, more rows than a block
// takes, against the reference; then each expert's first row alone; then GEMM 1 in one op.
TEST_F(PackedGemm, MatchesTheReferenceForRaggedLists) {
  Random random(12);
  struct Case {
    Format format;
    int parts;
    int64_t n, k;
    int most;  // rows of an expert
    float static_scale;
  };
  std::vector<Case> cases;
  for (const Format format : {Format::kW4Afp8, Format::kW8A8Int8}) {
    for (const float scale : {0.0f, 0.0078125f}) {
      if (format == Format::kW8A8Int8 && scale > 0) continue;
      for (const Case& c : {Case{format, 1, 384, 128, 100, scale},
                            {format, 1, 384, 640, 30, scale},
                            {format, 1, 256, 2048, 9, scale},
                            {format, 2, 128, 1280, 20, scale},
                            {format, 2, 256, 2048, 70, scale},
                            {format, 2, 128, 384, 150, scale}}) {
        cases.push_back(c);
      }
    }
  }
  for (const Case& c : cases) {
    const std::string what = name_of(c.format) + " n " + std::to_string(c.n) + " k " +
                             std::to_string(c.k) + " rows " + std::to_string(c.most);
    const std::vector<int32_t> counts = {0, 1, c.most, 0, 7, c.most / 2};
    const auto count = static_cast<int>(counts.size());
    const PackedExperts w = experts(c.format, count * c.parts, c.n, c.k, c.static_scale, random);
    std::vector<int32_t> offsets = {0};
    for (const int32_t rows : counts) offsets.push_back(offsets.back() + rows);
    const int64_t entries = offsets.back();
    // Slot 3 and those from 30 on are in no list, and are poison.
    const int64_t slots = 40;
    std::vector<int32_t> index;
    for (int64_t i = 0; i < entries; ++i) {
      const auto slot = static_cast<int32_t>(random.below(30));
      index.push_back(slot == 3 ? 4 : slot);
    }
    HostRows x(row_form(w.in_rows[0], slots), random);
    for (const int64_t slot : {int64_t{3}, int64_t{30}, slots - 1}) {
      std::memset(x.rows.row(slot), 0xff, static_cast<size_t>(x.rows.row_bytes()));
    }
    const int64_t width = c.parts * c.n;
    std::vector<float> expected(static_cast<size_t>(entries * width));
    reference::grouped_gemm(
        {x.rows, index.data(), offsets.data(), count, w.in_rows.data(), c.parts, expected.data()},
        host.context);

    const ops::Rows rows = up_rows(x.rows);
    const int32_t* device_index = up(index);
    const int32_t* device_offsets = up(offsets);
    float* y32 = fresh<float>(entries * width);
    bf16* y16 = fresh<bf16>(entries * width);
    op().grouped_gemm_f32(
        {rows, device_index, device_offsets, count, w.packed.data(), c.parts, y32}, context());
    op().grouped_gemm({rows, device_index, device_offsets, count, w.packed.data(), c.parts, y16},
                      context());
    const std::vector<float> got = floats(y32, entries * width);
    EXPECT_LT(relative_error(got, expected), tolerance(c.format)) << what;
    EXPECT_LT(relative_error(floats(y16, entries * width), expected), kBf16) << what;
    if (c.format == Format::kW8A8Int8) {
      EXPECT_TRUE(same_bits(got, expected)) << what;
    }

    std::vector<int32_t> alone_offsets = {0};
    std::vector<int32_t> alone_index;
    std::vector<float> first_rows;
    for (int e = 0; e < count; ++e) {
      const int32_t first = offsets[static_cast<size_t>(e)];
      if (counts[static_cast<size_t>(e)] > 0) {
        alone_index.push_back(index[static_cast<size_t>(first)]);
        first_rows.insert(first_rows.end(), got.begin() + first * width,
                          got.begin() + (first + 1) * width);
      }
      alone_offsets.push_back(static_cast<int32_t>(alone_index.size()));
    }
    const auto alone_entries = static_cast<int64_t>(alone_index.size());
    float* alone = fresh<float>(alone_entries * width);
    op().grouped_gemm_f32(
        {rows, up(alone_index), up(alone_offsets), count, w.packed.data(), c.parts, alone},
        context());
    EXPECT_TRUE(same_bits(floats(alone, alone_entries * width), first_rows)) << what;

    if (c.parts == 2) {
      ops::Rows h{.format = c.static_scale > 0 ? ActFormat::kE4m3Static : ActFormat::kE4m3Token,
                  .count = entries,
                  .k = c.n,
                  .static_scale = c.static_scale};
      ops::Rows apart = h;
      h.data = fresh<std::byte>(entries * h.row_bytes());
      apart.data = fresh<std::byte>(entries * h.row_bytes());
      const bool fused = op().grouped_swiglu(
          {rows, device_index, device_offsets, count, w.packed.data(), h}, context());
      EXPECT_EQ(fused, c.static_scale > 0);
      if (fused) {
        op().swiglu_quantise({y32, entries, c.n, apart, nullptr}, context());
        EXPECT_EQ(down(h.data, entries * h.row_bytes()), down(apart.data, entries * h.row_bytes()))
            << what;
      }
    }
    clear();
  }
}

TEST_F(PackedGemm, DoesNothingForEmptyLists) {
  Random random(13);
  const PackedExperts w = experts(Format::kW4Afp8, 3, 128, 256, 0, random);
  HostRows x(row_form(w.in_rows[0], 2), random);
  const std::vector<int32_t> offsets = {0, 0, 0, 0};
  float* y = fresh<float>(128);
  op().grouped_gemm_f32({up_rows(x.rows), nullptr, up(offsets), 3, w.packed.data(), 1, y},
                        context());
  for (const float v : floats(y, 128)) EXPECT_TRUE(std::isnan(v));
}

constexpr std::array<ActFormat, 4> kActFormats = {ActFormat::kE4m3Static, ActFormat::kE4m3Token,
                                                  ActFormat::kE4m3Group128, ActFormat::kInt8Token};

TEST_F(OnGpu, QuantiseGivesTheReferencesBytes) {
  Random random(3);
  for (const ActFormat format : kActFormats) {
    for (const int64_t k : {1, 96, 130, 7168}) {
      for (const bool ue8m0 : {false, true}) {
        const int64_t count = 5;
        ops::Rows form{
            .format = format, .count = count, .k = k, .static_scale = 0.011f, .ue8m0 = ue8m0};
        std::vector<float> x = bf16_normals(random, count * k, 3);
        std::fill_n(x.begin(), k, 0.0f);        // nothing to scale by
        x[static_cast<size_t>(2 * k)] = 1e30f;  // far away
        if (k > 100) x[static_cast<size_t>(3 * k + 99)] = std::numeric_limits<float>::infinity();
        for (float& v : x) v = round_to_bf16(v);
        cpu::Bytes memory(count * form.row_bytes());
        ops::Rows expected = form;
        expected.data = memory.data();
        reference::quantise({x.data(), k, expected}, host.context);
        ops::Rows out = form;
        out.data = up_bytes(memory.data(), static_cast<size_t>(count * form.row_bytes()));
        device().upload(
            out.data,
            std::vector<std::byte>(static_cast<size_t>(count * form.row_bytes()), std::byte{0x55})
                .data(),
            static_cast<size_t>(count * form.row_bytes()), context().stream);
        op().quantise({up_bf16(x, k), k, out}, context());
        const auto bytes = down(out.data, count * form.row_bytes());
        for (int64_t i = 0; i < count; ++i) {
          const std::byte* got = bytes.data() + i * form.row_bytes();
          EXPECT_TRUE(same_bits(got, expected.row(i), k)) << "row " << i << " k " << k;
          const auto* scales =
              reinterpret_cast<const float*>(got + quant::act_scale_offset(format, k));
          for (int64_t s = 0; s < quant::act_scales(format, k); ++s) {
            const float want = expected.scales(i)[s];
            EXPECT_TRUE(scales[s] == want || (std::isnan(scales[s]) && std::isnan(want)));
          }
        }
        clear();
      }
    }
  }
}

TEST_F(OnGpu, NormsPlainAndQuantised) {
  Random random(4);
  for (const int64_t n : {64, 130, 1536, 7168}) {
    const int64_t tokens = 4;
    const int64_t stride = n + 8;
    const std::vector<float> x = bf16_normals(random, tokens * stride, 2);
    const std::vector<float> residual = bf16_normals(random, tokens * n);
    const std::vector<float> weight = random.normals(n);
    const ops::NormWeight host_norm{weight.data(), n, 1e-6f};
    const ops::NormWeight norm{up(weight), n, 1e-6f};
    std::vector<float> expected(static_cast<size_t>(tokens * n));
    reference::rms_norm({.x = x.data(),
                         .tokens = tokens,
                         .x_stride = stride,
                         .norm = host_norm,
                         .out = expected.data()},
                        host.context);
    bf16* out = fresh<bf16>(tokens * 2 * n);
    op().rms_norm({.x = up_bf16(x),
                   .tokens = tokens,
                   .x_stride = stride,
                   .norm = norm,
                   .out = out,
                   .out_stride = 2 * n},
                  context());
    const std::vector<float> strided = floats(out, tokens * 2 * n);
    std::vector<float> got;
    for (int64_t t = 0; t < tokens; ++t) {
      got.insert(got.end(), strided.begin() + t * 2 * n, strided.begin() + t * 2 * n + n);
      EXPECT_TRUE(std::isnan(strided[static_cast<size_t>(t * 2 * n + n)]));
    }
    EXPECT_LT(relative_error(got, expected), kBf16);

    std::vector<float> sum = residual;
    const std::vector<float> delta(x.begin(), x.begin() + tokens * n);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += delta[i];
    reference::rms_norm({.x = sum.data(),
                         .tokens = tokens,
                         .x_stride = n,
                         .norm = host_norm,
                         .out = expected.data()},
                        host.context);
    for (const ActFormat format : kActFormats) {
      ops::Rows form{.format = format, .count = tokens, .k = n, .static_scale = 0.02f};
      cpu::Bytes memory(tokens * form.row_bytes());
      cpu::Bytes device_memory(tokens * form.row_bytes());
      ops::Rows want = form;
      want.data = memory.data();
      for (int64_t t = 0; t < tokens; ++t) {
        std::vector<float> y(expected.begin() + t * n, expected.begin() + (t + 1) * n);
        for (float& v : y) v = round_to_bf16(v);
        quant::quantise_row(y.data(), want, t);
      }
      ops::Rows have = form;
      float* device_residual = up(residual);
      have.data = up_bytes(memory.data(), static_cast<size_t>(tokens * form.row_bytes()));
      bf16* plain = fresh<bf16>(tokens * n);
      op().add_rms_norm({.x = up_bf16(delta),
                         .residual = device_residual,
                         .tokens = tokens,
                         .norm = norm,
                         .out = plain,
                         .quantised = have},
                        context());
      EXPECT_LT(relative_error(floats(plain, tokens * n), expected), kBf16);
      EXPECT_TRUE(same_bits(floats(device_residual, tokens * n), sum));
      const auto bytes = down(have.data, tokens * form.row_bytes());
      have.data = device_memory.data();
      std::memcpy(have.data, bytes.data(), bytes.size());
      expect_close_codes(have, want, "format " + std::to_string(static_cast<int>(format)));
    }
    clear();
  }
}

TEST_F(OnGpu, SwigluInOneChain) {
  Random random(5);
  for (const int64_t n : {64, 200, 2048}) {
    const int64_t rows = 6;
    const std::vector<float> gate_up = random.normals(rows * 2 * n, 2);
    std::vector<float> expected(static_cast<size_t>(rows * n));
    cpu::Bytes plain(rows * quant::act_row_bytes(ActFormat::kF32, n));
    ops::Rows f32{.format = ActFormat::kF32, .count = rows, .k = n, .data = plain.data()};
    reference::swiglu_quantise({gate_up.data(), rows, n, f32}, host.context);
    for (const ActFormat format : kActFormats) {
      ops::Rows form{.format = format, .count = rows, .k = n, .static_scale = 0.02f};
      cpu::Bytes memory(rows * form.row_bytes());
      cpu::Bytes device_memory(rows * form.row_bytes());
      ops::Rows want = form;
      want.data = memory.data();
      reference::swiglu_quantise({gate_up.data(), rows, n, want}, host.context);
      ops::Rows have = form;
      have.data = fresh<std::byte>(rows * form.row_bytes());
      const std::vector<int32_t> count = {5};  // the last row does not count
      op().swiglu_quantise({up(gate_up), rows, n, have, up(count)}, context());
      const auto bytes = down(have.data, rows * form.row_bytes());
      EXPECT_EQ(bytes.back(), std::byte{0xff});
      have.data = device_memory.data();
      std::memcpy(have.data, bytes.data(), bytes.size());
      want.count = 5;
      expect_close_codes(have, want, "format " + std::to_string(static_cast<int>(format)));
    }
    clear();
  }
}

// Pages out of order, several requests.
struct Pages {
  Pages(int64_t requests, int64_t each, Random& random) {
    for (int64_t i = 0; i < requests * each; ++i) order.push_back(static_cast<int32_t>(i));
    for (size_t i = order.size(); i > 1; --i)
      std::swap(order[i - 1], order[static_cast<size_t>(random.below(static_cast<int64_t>(i)))]);
    per_request = each;
  }
  std::vector<int32_t> order;
  int64_t per_request;
};

TEST_F(OnGpu, RopeAndKvAppend) {
  Random random(6);
  const int64_t tokens = 5, heads = 3, nope = 8, rope = 16, lora = 48, page = 4, pages = 8;
  const std::vector<float> table = random.normals(64 * rope);
  const std::vector<int32_t> positions = {0, 3, 4, 9, 2};
  std::vector<float> q = bf16_normals(random, tokens * heads * (nope + rope));
  bf16* device_q = up_bf16(q);
  const ops::Rope args{q.data(), tokens,           heads,       nope + rope, nope,
                       rope,     positions.data(), table.data()};
  reference::rope(args, host.context);
  op().rope({device_q, tokens, heads, nope + rope, nope, rope, up(positions), up(table)},
            context());
  EXPECT_LT(relative_error(floats(device_q, static_cast<int64_t>(q.size())), q), kBf16);

  const Pages order(2, pages, random);
  std::vector<const int32_t*> tables, device_tables;
  const int32_t* device_order = up(order.order);
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t offset = t < 3 ? 0 : pages;
    tables.push_back(order.order.data() + offset);
    device_tables.push_back(device_order + offset);
  }
  const int64_t width = lora + rope;
  const std::vector<float> kv = bf16_normals(random, tokens * (width + 8), 2);
  const std::vector<float> weight = random.normals(lora);
  std::vector<float> cache(static_cast<size_t>(2 * pages * page * width));
  reference::kv_append({kv.data(),
                        tokens,
                        width + 8,
                        {weight.data(), lora, 1e-6f},
                        rope,
                        positions.data(),
                        table.data(),
                        tables.data(),
                        {reinterpret_cast<std::byte*>(cache.data()), page, width}},
                       host.context);
  bf16* device_cache = up_bf16(std::vector<float>(cache.size(), 0.0f));
  op().kv_append({up_bf16(kv),
                  tokens,
                  width + 8,
                  {up(weight), lora, 1e-6f},
                  rope,
                  up(positions),
                  up(table),
                  up(device_tables),
                  {reinterpret_cast<std::byte*>(device_cache), page, width, quant::Format::kBf16}},
                 context());
  EXPECT_LT(relative_error(floats(device_cache, static_cast<int64_t>(cache.size())), cache), kBf16);
}

// As upload.cc arranges it: W_UK transposed.
std::vector<float> arranged(const std::vector<float>& w, int heads, int64_t nope, int64_t v,
                            int64_t lora) {
  std::vector<float> out(w.size());
  for (int64_t h = 0; h < heads; ++h) {
    const int64_t head = h * (nope + v) * lora;
    for (int64_t d = 0; d < nope + v; ++d) {
      for (int64_t l = 0; l < lora; ++l) {
        out[static_cast<size_t>(head + (d < nope ? l * nope + d : d * lora + l))] =
            w[static_cast<size_t>(head + d * lora + l)];
      }
    }
  }
  return out;
}

TEST_F(OnGpu, LatentAttention) {
  struct Shape {
    int heads;
    int64_t nope, rope, v, lora;
  };
  Random random(7);
  for (const Shape s : {Shape{4, 32, 16, 32, 64}, {20, 128, 64, 128, 512}, {3, 8, 4, 10, 40}}) {
    const int64_t page = 16, pages = 24;
    const int64_t width = s.lora + s.rope;
    const Pages order(2, pages, random);
    const std::vector<float> w = bf16_normals(random, s.heads * (s.nope + s.v) * s.lora,
                                              1 / std::sqrt(static_cast<float>(s.lora)));
    const std::vector<int32_t> positions = {0, 5, 63, 64, 200, 311};
    const auto tokens = static_cast<int64_t>(positions.size());
    const std::vector<float> q = bf16_normals(random, tokens * s.heads * (s.nope + s.rope));
    std::vector<float> cache = bf16_normals(random, 2 * pages * page * width);
    // What no query may see is poison: the last positions of each request.
    std::vector<const int32_t*> tables, device_tables;
    const int32_t* device_order = up(order.order);
    for (int64_t t = 0; t < tokens; ++t) {
      tables.push_back(order.order.data() + (t % 2) * pages);
      device_tables.push_back(device_order + (t % 2) * pages);
    }
    for (int64_t r = 0; r < 2; ++r) {
      for (int64_t p = 312; p < pages * page; ++p) {
        const int64_t row =
            order.order[static_cast<size_t>(r * pages + p / page)] * page + p % page;
        std::fill_n(cache.begin() + row * width, width, std::numeric_limits<float>::quiet_NaN());
      }
    }
    const float scale = 1 / std::sqrt(static_cast<float>(s.nope + s.rope));
    std::vector<float> wide = w;
    std::vector<float> expected(static_cast<size_t>(tokens * s.heads * s.v));
    ops::Mla args{.q = q.data(),
                  .tokens = tokens,
                  .heads = s.heads,
                  .nope = s.nope,
                  .rope_dim = s.rope,
                  .v_dim = s.v,
                  .lora = s.lora,
                  .w_kv_b = {.format = Format::kF32,
                             .n = s.heads * (s.nope + s.v),
                             .k = s.lora,
                             .codes = reinterpret_cast<const std::byte*>(wide.data())},
                  .scale = scale,
                  .segment = 128,
                  .keys = 312,
                  .positions = positions.data(),
                  .page_tables = tables.data(),
                  .cache = {reinterpret_cast<std::byte*>(cache.data()), page, width},
                  .out = expected.data()};
    reference::mla(args, host.context);

    const bf16* device_w = up_bf16(arranged(w, s.heads, s.nope, s.v, s.lora));
    bf16* out = fresh<bf16>(static_cast<int64_t>(expected.size()));
    ops::MlaOf<bf16> gpu{
        .q = up_bf16(q),
        .tokens = tokens,
        .heads = s.heads,
        .nope = s.nope,
        .rope_dim = s.rope,
        .v_dim = s.v,
        .lora = s.lora,
        .w_kv_b = {.format = Format::kBf16,
                   .n = s.heads * (s.nope + s.v),
                   .k = s.lora,
                   .codes = reinterpret_cast<const std::byte*>(device_w)},
        .scale = scale,
        .segment = 128,
        .keys = 312,
        .positions = up(positions),
        .page_tables = up(device_tables),
        .cache = {reinterpret_cast<std::byte*>(up_bf16(cache)), page, width, quant::Format::kBf16},
        .out = out};
    for (const bool decode : {false, true}) {
      (decode ? op().mla_decode : op().mla_prefill)(gpu, context());
      const std::vector<float> got = floats(out, static_cast<int64_t>(expected.size()));
      EXPECT_LT(relative_error(got, expected), 6e-3)
          << (decode ? "decode" : "prefill") << " lora " << s.lora;
      // A row alone, and with a looser bound of the keys, has the same bits.
      ops::MlaOf<bf16> one = gpu;
      const int64_t row = s.heads * s.v;
      one.tokens = 1;
      one.q += 4 * s.heads * (s.nope + s.rope);
      one.positions += 4;
      one.page_tables += 4;
      one.keys = 384;
      one.out = fresh<bf16>(row);
      (decode ? op().mla_decode : op().mla_prefill)(one, context());
      EXPECT_TRUE(same_bits(floats(one.out, row).data(), got.data() + 4 * row, row));
    }
    clear();
  }
}

TEST_F(OnGpu, RouteChoosesAsTheReference) {
  Random random(8);
  struct Case {
    ops::Scoring scoring;
    ops::TopkMethod method;
    int64_t experts;
    int groups, topk_groups, topk;
    bool normalise, bias;
    Format gate;
  };
  using S = ops::Scoring;
  using M = ops::TopkMethod;
  for (const Case& x :
       {Case{S::kSigmoid, M::kNoauxTc, 256, 8, 4, 8, true, true, Format::kBf16},
        {S::kSigmoid, M::kNoauxTc, 16, 4, 2, 4, true, true, Format::kF32},
        {S::kSoftmax, M::kGreedy, 64, 1, 1, 6, false, false, Format::kBf16},
        {S::kSoftmax, M::kGroupLimitedGreedy, 160, 8, 3, 6, false, false, Format::kF32},
        {S::kSigmoid, M::kNoauxTc, 384, 1, 1, 8, true, true, Format::kBf16}}) {
    const int64_t tokens = 33, hidden = 256;
    cpu::Weights gate(x.gate, x.experts, hidden, random);
    const std::vector<float> bias = random.normals(x.experts, 0.1f);
    const std::vector<float> h = bf16_normals(random, tokens * hidden);
    const int64_t n = tokens * x.topk;
    std::vector<int32_t> ids(static_cast<size_t>(n));
    std::vector<float> weights(static_cast<size_t>(n));
    ops::Route a{.x = h.data(),
                 .tokens = tokens,
                 .gate = gate.matrix,
                 .bias = x.bias ? bias.data() : nullptr,
                 .scoring = x.scoring,
                 .method = x.method,
                 .groups = x.groups,
                 .topk_groups = x.topk_groups,
                 .topk = x.topk,
                 .normalise = x.normalise,
                 .scaling = 2.5f,
                 .ids = ids.data(),
                 .weights = weights.data()};
    reference::route(a, host.context);
    int32_t* device_ids = fresh<int32_t>(n);
    float* device_weights = fresh<float>(n);
    op().route({.x = up_bf16(h),
                .tokens = tokens,
                .gate = up_matrix(gate.matrix),
                .bias = x.bias ? up(bias) : nullptr,
                .scoring = x.scoring,
                .method = x.method,
                .groups = x.groups,
                .topk_groups = x.topk_groups,
                .topk = x.topk,
                .normalise = x.normalise,
                .scaling = 2.5f,
                .ids = device_ids,
                .weights = device_weights},
               context());
    EXPECT_EQ(down(device_ids, n), ids) << x.experts;
    EXPECT_LT(relative_error(floats(device_weights, n), weights), kExact);
    clear();
  }
}

TEST_F(OnGpu, ListsReduceAndCombine) {
  Random random(9);
  for (const int64_t tokens : {0, 1, 7, 100}) {
    const int experts = 32, topk = 6;
    const int64_t hidden = 136;
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < tokens * topk; ++i) {
      ids.push_back(static_cast<int32_t>(random.below(experts + 4)) -
                    4);  // some are none, some repeat
      if (ids.back() < -1 || i / topk == 3) ids.back() = -1;
    }
    const std::vector<float> weights = random.normals(tokens * topk);
    const exchange::Options options{.experts = experts,
                                    .topk = topk,
                                    .hidden = hidden,
                                    .widest_row_bytes = 64,
                                    .max_dispatch_tokens = 128,
                                    .max_normal_tokens = 128};
    const auto x = exchange::make_gpu_exchange(options, context().stream);
    auto lists = x->dispatch({.rows = nullptr,
                              .row_bytes = 64,
                              .tokens = tokens,
                              .ids = up(ids),
                              .weights = up(weights)});
    ASSERT_TRUE(lists.is_ok()) << lists.status().message();
    const std::vector<int32_t> offsets = down(lists->offsets, experts + 1);
    const int64_t entries = offsets.back();
    const std::vector<int32_t> index = down(lists->row_index, entries);
    const std::vector<float> list_weights = floats(lists->row_weight, entries);
    const std::vector<int32_t> slot_offsets = down(lists->slot_offsets, tokens + 1);
    const std::vector<int32_t> slot_entries = down(lists->slot_entries, entries);
    // Expected by the plainest means: a stable walk an expert.
    std::vector<int32_t> want_index;
    std::vector<float> want_weights;
    for (int e = 0; e < experts; ++e) {
      EXPECT_EQ(offsets[static_cast<size_t>(e)], static_cast<int32_t>(want_index.size()));
      for (size_t i = 0; i < ids.size(); ++i) {
        if (ids[i] != e) continue;
        want_index.push_back(static_cast<int32_t>(i) / topk);
        want_weights.push_back(weights[i]);
      }
    }
    EXPECT_EQ(index, want_index);
    EXPECT_EQ(list_weights, want_weights);
    std::vector<int32_t> want_slots;
    for (int32_t t = 0; t < tokens; ++t) {
      EXPECT_EQ(slot_offsets[static_cast<size_t>(t)], static_cast<int32_t>(want_slots.size()));
      for (size_t i = 0; i < index.size(); ++i) {
        if (want_index[i] == t) want_slots.push_back(static_cast<int32_t>(i));
      }
    }
    EXPECT_EQ(slot_entries, want_slots);

    const std::vector<float> y = bf16_normals(random, entries * hidden);
    const std::vector<float> shared = bf16_normals(random, tokens * hidden);
    std::vector<float> parts(static_cast<size_t>(tokens * hidden));
    ExpertRows host_lists = *lists;
    host_lists.entries = entries;
    host_lists.offsets = offsets.data();
    host_lists.row_index = index.data();
    host_lists.row_weight = list_weights.data();
    host_lists.slot_offsets = slot_offsets.data();
    host_lists.slot_entries = slot_entries.data();
    reference::moe_reduce({host_lists, y.data(), hidden, parts.data()}, host.context);
    bf16* device_parts = x->parts_buffer<bf16>();
    op().moe_reduce({*lists, up_bf16(y, hidden), hidden, device_parts}, context());
    auto combined = x->combine(0, device_parts);
    ASSERT_TRUE(combined.is_ok());
    bf16* out = fresh<bf16>(tokens * hidden);
    op().moe_combine({*combined, up_bf16(shared), tokens, hidden, out}, context());
    std::vector<uint8_t> present;
    for (int64_t t = 0; t < tokens; ++t)
      present.push_back(
          slot_offsets[static_cast<size_t>(t)] < slot_offsets[static_cast<size_t>(t + 1)] ? 1 : 0);
    std::vector<float> expected(static_cast<size_t>(tokens * hidden));
    reference::moe_combine(
        {{1, tokens, reinterpret_cast<const std::byte*>(parts.data()), present.data()},
         shared.data(),
         tokens,
         hidden,
         expected.data()},
        host.context);
    EXPECT_LT(relative_error(floats(out, tokens * hidden), expected), kBf16);
    clear();
  }
}

TEST_F(OnGpu, SampleDrawsTheReferencesTokens) {
  Random random(10);
  const int64_t vocabulary = 5000;
  std::vector<ops::SampleRow> rows;
  const std::vector<int32_t> seen = {1, 7, 7, 4999, 12, 30};
  for (int i = 0; i < 40; ++i) {
    ops::SampleRow r{.temperature = i % 4 == 0 ? 0.0f : 0.5f + 0.1f * static_cast<float>(i % 7),
                     .top_k = i % 3 == 0 ? 0 : 1 + i,
                     .top_p = i % 5 == 0 ? 1.0f : 0.9f,
                     .min_p = i % 6 == 1 ? 0.05f : 0.0f,
                     .seed = static_cast<uint64_t>(i) * 977,
                     .position = static_cast<uint32_t>(i)};
    if (i % 2 == 1) {
      r.repetition_penalty = 1.3f;
      r.presence_penalty = 0.2f;
      r.frequency_penalty = 0.4f;
      r.seen = r.generated = seen.data();
      r.seen_count = r.generated_count = static_cast<int64_t>(seen.size());
    }
    rows.push_back(r);
  }
  const auto count = static_cast<int64_t>(rows.size());
  std::vector<float> logits = random.normals(count * vocabulary, 2);
  for (int64_t i = 0; i < vocabulary; i += 3)
    logits[static_cast<size_t>(i)] = std::round(logits[static_cast<size_t>(i)]);  // ties
  float* device_logits = up(logits);
  std::vector<ops::SampleRow> device_rows = rows;
  const int32_t* device_seen = up(seen);
  for (ops::SampleRow& r : device_rows) r.seen = r.generated = device_seen;
  std::vector<int32_t> ids(rows.size());
  std::vector<float> logprobs(rows.size());
  reference::sample({logits.data(), count, vocabulary, rows.data(), ids.data(), logprobs.data()},
                    host.context);
  int32_t* device_ids = fresh<int32_t>(count);
  float* device_logprobs = fresh<float>(count);
  op().sample({device_logits, count, vocabulary, up(device_rows), device_ids, device_logprobs},
              context());
  EXPECT_EQ(down(device_ids, count), ids);
  EXPECT_LT(relative_error(floats(device_logprobs, count), logprobs), kExact);
}

TEST_F(OnGpu, EmbedGathersRows) {
  Random random(11);
  for (const Format format : {Format::kF32, Format::kBf16}) {
    cpu::Weights table(format, 20, 72, random);
    const std::vector<int32_t> ids = {19, 0, 7, 7};
    std::vector<float> expected(4 * 72);
    reference::embed({ids.data(), 4, table.matrix, expected.data()}, host.context);
    bf16* out = fresh<bf16>(4 * 72);
    op().embed({up(ids), 4, up_matrix(table.matrix), out}, context());
    EXPECT_LT(relative_error(floats(out, 4 * 72), expected), kBf16);
  }
}

}  // namespace
}  // namespace sortie::cuda
