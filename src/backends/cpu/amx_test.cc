// The AMX kernels over an emulation of the tile instructions: this shows that operands are laid out
// and results folded as they must be, not that the instructions were called rightly.
#include "backends/cpu/amx_gemm.h"
#include "backends/cpu/drivers.h"
#include "backends/cpu/test_support.h"

namespace sortie::cpu {
namespace {

using quant::ActFormat;

// TDPBSSD and TDPBF16PS (Intel SDM volume 2): row k of the right tile holds, for each column, the
// dword that meets dword k of a row of the left one.
struct EmulatedTiles {
  static inline std::byte sums[4][kTile][kTile][4];

  static void begin() {}
  static void end() {}
  static void zero() { std::memset(sums, 0, sizeof sums); }

  template <bool kInt8>
  static void dot(std::byte (&sum)[kTile][kTile][4], const std::byte* left,
                  const std::byte* right) {
    for (int64_t m = 0; m < kTile; ++m) {
      for (int64_t n = 0; n < kTile; ++n) {
        for (int64_t k = 0; k < kTile; ++k) {
          const std::byte* a = left + m * kTileBytes + 4 * k;
          const std::byte* b = right + k * kTileBytes + 4 * n;
          if (kInt8) {
            auto v = load_unaligned<int32_t>(sum[m][n]);
            for (int i = 0; i < 4; ++i)
              v += int32_t{static_cast<int8_t>(a[i])} * static_cast<int8_t>(b[i]);
            std::memcpy(sum[m][n], &v, sizeof v);
          } else {
            auto v = load_unaligned<float>(sum[m][n]);
            for (int i = 0; i < 4; i += 2)
              v += to_float(load_unaligned<bf16>(a + i)) * to_float(load_unaligned<bf16>(b + i));
            std::memcpy(sum[m][n], &v, sizeof v);
          }
        }
      }
    }
  }
  template <bool kInt8>
  static void step(const void* weights, const void* first, const void* second) {
    const auto* w = static_cast<const std::byte*>(weights);
    for (int64_t m = 0; m < 2; ++m) {
      const std::byte* left = w + m * kTile * kTileBytes;
      dot<kInt8>(sums[2 * m], left, static_cast<const std::byte*>(first));
      if (second != nullptr)
        dot<kInt8>(sums[2 * m + 1], left, static_cast<const std::byte*>(second));
    }
  }
  static void store(void* product) { std::memcpy(product, sums, sizeof sums); }
};

Kernels emulated() {
  Kernels k = kGenericKernels;
  k.prepared_bytes = tiles_prepared_bytes;
  k.prepare = [](Format f, const std::byte* codes, int64_t n, std::byte* out) {
    tiles_prepare(f, codes, n, out);
    return 0;
  };
  k.gemm = tiles_gemm<EmulatedTiles>;
  return k;
}

TEST(Amx, EmulatedTilesMatchReferenceAndDoNotDependOnTheRows) {
  Random random(21);
  const Kernels kernels = emulated();
  for (const Format format : {Format::kFp8Block, Format::kW4Afp8, Format::kW8A8Int8}) {
    for (const auto& [rows, n, k] : {std::tuple<int64_t, int64_t, int64_t>{1, 5, 3},
                                     {17, 33, 129},
                                     {66, 131, 300},
                                     {40, 16, 257}}) {
      SCOPED_TRACE(testing::Message()
                   << quant::format_name(format) << " " << rows << "x" << n << "x" << k);
      Weights w(format, n, k, random);
      Activations x(quant::act_format(w.matrix), rows, 2, k, random);
      std::vector<float> expected(static_cast<size_t>(rows * n));
      std::vector<float> got(expected.size());
      Machine machine(1);
      reference::linear({x.rows, w.matrix, nullptr, expected.data(), n}, machine.context);
      linear({x.rows, w.matrix, nullptr, got.data(), n}, machine.context, kernels);
      EXPECT_LE(relative_error(got, expected), format == Format::kW8A8Int8 ? 0 : 1e-6);
      for (int64_t t = 0; t < rows; ++t) {
        quant::Rows one = x.rows;
        one.data = x.rows.row(t);
        one.count = 1;
        std::vector<float> alone(static_cast<size_t>(n));
        linear({one, w.matrix, nullptr, alone.data(), n}, machine.context, kernels);
        ASSERT_TRUE(same_bits(alone.data(), got.data() + t * n, n));
      }
    }
  }
}

}  // namespace
}  // namespace sortie::cpu
