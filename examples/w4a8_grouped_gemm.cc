// A grouped GEMM with int4 weights and e4m3 activations, as in a mixture-of-experts layer: each
// expert multiplies the tokens that were routed to it.
//
//   w4a8_grouped_gemm [experts [tokens an expert]]
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <random>
#include <utility>
#include <vector>

#include "sortie/backends/cpu/isa.h"
#include "sortie/backends/reference/reference.h"
#include "sortie/base/clock.h"
#include "sortie/quant/activations.h"
#include "sortie/quant/matrix_ops.h"

using namespace sortie;

namespace {

constexpr int64_t kN = 1408;  // outputs of one matrix
constexpr int64_t kK = 2048;  // inputs
constexpr int kParts = 2;     // gate and up: two matrices an expert, side by side in the output

// A matrix [kN, kK] of random weights in w4afp8. A Matrix owns nothing, so `memory` does.
quant::Matrix random_weights(std::mt19937& random, std::deque<AlignedBuffer>& memory) {
  std::uniform_real_distribution<float> uniform(-0.05f, 0.05f);
  std::vector<float> w(kN * kK);
  for (float& v : w) v = uniform(random);
  const quant::Matrix source{.format = quant::Format::kF32,
                             .n = kN,
                             .k = kK,
                             .codes = reinterpret_cast<const std::byte*>(w.data())};
  constexpr auto kFormat = quant::Format::kW4Afp8;
  const AlignedBuffer& codes = memory.emplace_back(quant::code_bytes(kFormat, kN, kK));
  const AlignedBuffer& scales = memory.emplace_back(quant::scale_bytes(kFormat, kN, kK));
  quant::quantise_rows(source, 0, kN, kFormat, codes.data(), scales.data());
  return {.format = kFormat, .n = kN, .k = kK, .codes = codes.data(), .scales = scales.data()};
}

// The same matrix in the layout that the backend reads fastest, if it has one. Done once, at load.
quant::Matrix pack(const quant::Matrix& rows, const ops::Backend& backend,
                   std::deque<AlignedBuffer>& memory) {
  const int64_t bytes = backend.pack == nullptr ? 0 : backend.packed_bytes(rows);
  if (bytes == 0) return rows;
  const AlignedBuffer& codes = memory.emplace_back(static_cast<size_t>(bytes));
  backend.pack(rows, codes.data());
  quant::Matrix tiles = rows;
  tiles.layout = quant::Layout::kTiles;
  tiles.codes = codes.data();
  tiles.scales = nullptr;  // the tiles of w4afp8 hold them
  return tiles;
}

}  // namespace

int main(int argc, char** argv) {
  const int experts = argc > 1 ? std::max(1, std::atoi(argv[1])) : 16;
  const int rows_each = argc > 2 ? std::max(1, std::atoi(argv[2])) : 1;
  const auto isa = cpu::choose_isa();  // the best of this processor, or SORTIE_ISA
  if (!isa.is_ok()) return std::fprintf(stderr, "%s\n", isa.status().message().c_str()), 2;
  const ops::Backend& backend = cpu::backend(*isa);

  std::mt19937 random(1);
  std::deque<AlignedBuffer> memory;
  std::vector<quant::Matrix> rows;  // as the reference reads them
  std::vector<quant::Matrix> fast;  // as `backend` does
  for (int i = 0; i < experts * kParts; ++i) {
    rows.push_back(random_weights(random, memory));
    fast.push_back(pack(rows.back(), backend, memory));
  }

  // One activation row for each list entry, quantised with a scale of its own. Lists are prefix
  // sums: expert e has the entries offsets[e] to offsets[e + 1].
  const int64_t entries = int64_t{experts} * rows_each;
  quant::Rows x{.format = quant::act_format(rows[0]), .count = entries, .k = kK};
  x.data = memory.emplace_back(static_cast<size_t>(entries * x.row_bytes())).data();
  std::normal_distribution<float> normal;
  std::vector<float> values(kK);
  for (int64_t i = 0; i < entries; ++i) {
    for (float& v : values) v = normal(random);
    quant::quantise_row(values.data(), x, i);
  }
  std::vector<int32_t> offsets;
  for (int e = 0; e <= experts; ++e) offsets.push_back(e * rows_each);

  ThreadPool threads(available_cpus());
  Arena scratch;
  const auto multiply = [&](const ops::Backend& b, const std::vector<quant::Matrix>& w) {
    std::vector<float> y(static_cast<size_t>(entries * kParts * kN));
    scratch.reset();
    const TimePoint start = Clock::now();
    b.grouped_gemm({.x = x,
                    .row_index = nullptr,  // entry i is row i
                    .offsets = offsets.data(),
                    .local_experts = experts,
                    .w = w.data(),
                    .parts = kParts,
                    .out = y.data()},
                   {threads, scratch});
    return std::pair{y, to_seconds(Clock::now() - start)};
  };
  const auto [expected, slow] = multiply(reference::backend(), rows);
  auto [y, best] = multiply(backend, fast);
  for (int i = 0; i < 20; ++i) best = std::min(best, multiply(backend, fast).second);

  float error = 0;
  float largest = 0;
  for (size_t i = 0; i < y.size(); ++i) {
    error = std::max(error, std::fabs(y[i] - expected[i]));
    largest = std::max(largest, std::fabs(expected[i]));
  }
  const double bytes = static_cast<double>(rows[0].bytes()) * kParts * experts;
  std::printf("%.*s: %d experts x %d tokens, %.1f MB of weights in %.0f us: %.1f GB/s\n",
              static_cast<int>(backend.name.size()), backend.name.data(), experts, rows_each,
              bytes * 1e-6, best * 1e6, bytes / best * 1e-9);
  std::printf("%.0f times as fast as the reference; largest difference %.1e of %.1f\n", slow / best,
              static_cast<double>(error), static_cast<double>(largest));
  // The sums' order differs between backends, the rounding of operands does not.
  return largest > 0 && error <= 1e-5f * largest ? 0 : 1;
}
