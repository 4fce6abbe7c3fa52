#include <numeric>

#include "backends/cpu/test_support.h"
#include "quant/matrix_ops.h"

namespace sortie::cpu {
namespace {

struct Dimensions {
  int heads;
  int64_t nope;
  int64_t rope;
  int64_t v;
  int64_t lora;
  int64_t page;
};
constexpr Dimensions kDimensions[] = {{16, 32, 16, 32, 64, 64},
                                      {3, 20, 8, 24, 40, 16},
                                      {1, 1, 2, 1, 3, 7},
                                      {5, 128, 64, 128, 512, 64}};

// Two requests with caches of their own; positions past what they hold are poison.
class Attention {
 public:
  Attention(const Dimensions& d, quant::Format format, int64_t length, Random& random,
            quant::Format cache_format = quant::Format::kF32)
      : d_(d),
        cache_format_(cache_format),
        weights_(format, d.heads * (d.nope + d.v), d.lora, random),
        pages_each_((length + d.page - 1) / d.page + 1) {
    const int64_t rows = 2 * pages_each_ * d.page;
    cache_.resize(static_cast<size_t>(rows * cache().row_bytes()));
    const std::vector<float> nans(static_cast<size_t>(width()), kNan);
    for (int64_t i = 0; i < rows; ++i) {
      quant::store_plain_row(cache_format, nans.data(), width(), cache().row(0, i));
    }
    for (int request = 0; request < 2; ++request) {
      tables_[request].resize(static_cast<size_t>(pages_each_));
      std::iota(tables_[request].rbegin(), tables_[request].rend(), request * pages_each_);
      for (int64_t p = 0; p < length; ++p) {
        const std::vector<float> row = random.normals(width());
        quant::store_plain_row(
            cache_format, row.data(), width(),
            cache().row(tables_[request][static_cast<size_t>(p / d.page)], p % d.page));
      }
    }
  }

  int64_t width() const { return d_.lora + d_.rope; }
  int64_t q_width() const { return d_.heads * (d_.nope + d_.rope); }
  int64_t out_width() const { return d_.heads * d_.v; }
  ops::LatentCache cache() { return {cache_.data(), d_.page, width(), cache_format_}; }

  // Rows of q at `positions`, of request `request[t]`.
  std::vector<float> run(void (*op)(const ops::Mla&, const ops::Context&), const float* q,
                         const std::vector<int32_t>& positions, const std::vector<int>& request,
                         int64_t segment, int threads) {
    std::vector<const int32_t*> tables;
    for (const int r : request) tables.push_back(tables_[r].data());
    std::vector<float> out(positions.size() * static_cast<size_t>(out_width()), kNan);
    Machine machine(threads);
    op({.q = q,
        .tokens = static_cast<int64_t>(positions.size()),
        .heads = d_.heads,
        .nope = d_.nope,
        .rope_dim = d_.rope,
        .v_dim = d_.v,
        .lora = d_.lora,
        .w_kv_b = weights_.matrix,
        .scale = 1 / std::sqrt(static_cast<float>(d_.nope + d_.rope)),
        .segment = segment,
        .positions = positions.data(),
        .page_tables = tables.data(),
        .cache = cache(),
        .out = out.data()},
       machine.context);
    return out;
  }

 private:
  Dimensions d_;
  quant::Format cache_format_;
  Weights weights_;
  int32_t pages_each_;
  std::vector<std::byte> cache_;
  std::vector<int32_t> tables_[2];
};

class Mla : public IsaTest {};

TEST_P(Mla, DecodeMatchesReferenceAndDoesNotDependOnTheBatch) {
  Random random(11);
  for (const Dimensions& d : kDimensions) {
    for (const quant::Format format : {quant::Format::kF32, quant::Format::kBf16,
                                       quant::Format::kFp8Block, quant::Format::kW8A8Int8}) {
      const int64_t length = d.lora == 512 ? 102 : 333;
      Attention a(d, format, length, random);
      const std::vector<int32_t> positions = {0, static_cast<int32_t>(length - 1), 63, 64, 100};
      const std::vector<int> request = {0, 0, 1, 1, 0};
      const std::vector<float> q = random.normals(5 * a.q_width());
      const std::vector<float> expected =
          a.run(reference::mla, q.data(), positions, request, 64, 1);
      for (const int64_t segment : {64, 100, 4096}) {
        SCOPED_TRACE(testing::Message() << "heads " << d.heads << " segment " << segment);
        const auto got = a.run(op().mla_decode, q.data(), positions, request, segment, 1);
        EXPECT_LE(relative_error(got, expected), 2e-6);
        for (const int threads : {2, 3}) {
          EXPECT_TRUE(same_bits(
              a.run(op().mla_decode, q.data(), positions, request, segment, threads), got));
        }
        for (size_t t = 0; t < positions.size(); ++t) {
          const auto alone =
              a.run(op().mla_decode, q.data() + static_cast<int64_t>(t) * a.q_width(),
                    {positions[t]}, {request[t]}, segment, 2);
          EXPECT_TRUE(same_bits(alone.data(), got.data() + static_cast<int64_t>(t) * a.out_width(),
                                a.out_width()));
        }
      }
    }
  }
}

TEST_P(Mla, PrefillMatchesReferenceAndDoesNotDependOnTheChunks) {
  Random random(12);
  for (const Dimensions& d : kDimensions) {
    const int64_t length = 201;
    Attention a(d, quant::Format::kBf16, length, random);
    const std::vector<float> q = random.normals(length * a.q_width());
    const auto chunk = [&](int64_t begin, int64_t end, int threads, bool judge) {
      std::vector<int32_t> positions(static_cast<size_t>(end - begin));
      std::iota(positions.begin(), positions.end(), static_cast<int32_t>(begin));
      return a.run(judge ? reference::mla : op().mla_prefill, q.data() + begin * a.q_width(),
                   positions, std::vector<int>(positions.size(), 1), 64, threads);
    };
    const std::vector<float> whole = chunk(0, length, 1, false);
    if (d.lora < 512) {
      EXPECT_LE(relative_error(whole, chunk(0, length, 1, true)), 2e-6);
    }
    EXPECT_LE(relative_error(chunk(150, 158, 1, false), chunk(150, 158, 1, true)), 2e-6);
    EXPECT_TRUE(same_bits(chunk(0, length, 2, false), whole));
    for (const std::vector<int64_t>& cuts : std::vector<std::vector<int64_t>>{
             {0, 1, 2, 64, 65, length}, {0, 63, 130, length}, {0, 128, 192, length}}) {
      std::vector<float> pieces;
      for (size_t i = 0; i + 1 < cuts.size(); ++i) {
        const auto piece = chunk(cuts[i], cuts[i + 1], 3, false);
        pieces.insert(pieces.end(), piece.begin(), piece.end());
      }
      EXPECT_TRUE(same_bits(pieces, whole));
    }
  }
}

// Over a bf16 cache: to fp32's precision where the products are fp32, to bf16's where the query and
// the exponentials are rounded too.
TEST_P(Mla, Bf16CacheMatchesReferenceAndDoesNotDependOnTheBatch) {
  Random random(14);
  for (const Dimensions& d : kDimensions) {
    const int64_t length = 333;
    Attention a(d, quant::Format::kBf16, length, random, quant::Format::kBf16);
    const std::vector<int32_t> positions = {0, static_cast<int32_t>(length - 1), 63, 64, 101};
    const std::vector<int> request = {0, 0, 1, 1, 0};
    const std::vector<float> q = random.normals(5 * a.q_width());
    const std::vector<float> expected = a.run(reference::mla, q.data(), positions, request, 64, 1);
    const auto prefilled = [&](int threads) {
      return a.run(op().mla_prefill, q.data(), {63}, {1}, 64, threads);
    };
    EXPECT_LE(relative_error(prefilled(2), a.run(reference::mla, q.data(), {63}, {1}, 64, 1)),
              2e-6);
    EXPECT_TRUE(same_bits(prefilled(1), prefilled(3)));
    for (const int64_t segment : {64, 100, 4096}) {
      SCOPED_TRACE(testing::Message() << "heads " << d.heads << " segment " << segment);
      const auto got = a.run(op().mla_decode, q.data(), positions, request, segment, 1);
      EXPECT_LE(relative_error(got, expected), 6e-3);
      for (const int threads : {2, 3}) {
        EXPECT_TRUE(
            same_bits(a.run(op().mla_decode, q.data(), positions, request, segment, threads), got));
      }
      for (size_t t = 0; t < positions.size(); ++t) {
        const auto alone = a.run(op().mla_decode, q.data() + static_cast<int64_t>(t) * a.q_width(),
                                 {positions[t]}, {request[t]}, segment, 2);
        EXPECT_TRUE(same_bits(alone.data(), got.data() + static_cast<int64_t>(t) * a.out_width(),
                              a.out_width()));
      }
    }
  }
}

// A latent that holds NaN spoils the rows that see it and no other.
TEST_P(Mla, LaterPositionsAreNotRead) {
  Random random(13);
  const Dimensions d = kDimensions[0];
  std::vector<int32_t> positions(30);
  std::iota(positions.begin(), positions.end(), 0);
  for (const quant::Format cache : {quant::Format::kF32, quant::Format::kBf16}) {
    Attention a(d, quant::Format::kBf16, 20, random, cache);  // positions from 20 on are NaN
    const std::vector<float> q = random.normals(30 * a.q_width());
    for (auto* fn : {op().mla_prefill, op().mla_decode}) {
      const auto out = a.run(fn, q.data(), positions, std::vector<int>(30, 0), 64, 2);
      for (int64_t t = 0; t < 30; ++t) {
        for (int64_t i = 0; i < a.out_width(); ++i)
          ASSERT_EQ(std::isnan(out[static_cast<size_t>(t * a.out_width() + i)]), t >= 20) << t;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, Mla, testing::ValuesIn(all_isas()), isa_parameter);

}  // namespace
}  // namespace sortie::cpu
