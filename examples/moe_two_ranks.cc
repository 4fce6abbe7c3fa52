// A mixture-of-experts layer whose experts lie on two ranks, here threads of one process. Each rank
// has half of the tokens and half of the experts; what comes out is what one rank gives, bit for
// bit, because rows and sums have an order that does not depend on where an expert lies.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "sortie/backends/cpu/isa.h"
#include "sortie/exchange/exchange.h"
#include "sortie/exchange/local.h"
#include "sortie/quant/matrix_ops.h"

using namespace sortie;

namespace {

constexpr int64_t kHidden = 512, kInner = 256, kTokens = 12;
constexpr int kExperts = 16, kTopk = 4;

std::vector<float> random_floats(int64_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 0.1f);
  std::vector<float> v(static_cast<size_t>(n));
  for (float& f : v) f = normal(random);
  return v;
}

// A matrix [n, k] and its memory; in int4 with group scales unless it is plain.
struct Weights {
  std::vector<float> plain;
  AlignedBuffer codes, scales;
  quant::Matrix matrix;

  Weights(int64_t n, int64_t k, unsigned seed, quant::Format format)
      : plain(random_floats(n * k, seed)),
        matrix{.n = n, .k = k, .codes = reinterpret_cast<const std::byte*>(plain.data())} {
    matrix.format = quant::Format::kF32;
    if (format == quant::Format::kF32) return;
    codes = AlignedBuffer(static_cast<size_t>(quant::code_bytes(format, n, k)));
    scales = AlignedBuffer(static_cast<size_t>(quant::scale_bytes(format, n, k)));
    quant::quantise_rows(matrix, 0, n, format, codes.data(), scales.data());
    matrix = {.format = format, .n = n, .k = k, .codes = codes.data(), .scales = scales.data()};
  }
};

struct Layer {
  Weights router{kExperts, kHidden, 1, quant::Format::kF32};
  std::vector<Weights> memory;
  std::vector<quant::Matrix> gate_up;  // [experts * 2]
  std::vector<quant::Matrix> down;     // [experts]
  Layer() {
    const auto make = [&](int64_t n, int64_t k) {
      const auto seed = static_cast<unsigned>(memory.size()) + 2;
      return memory.emplace_back(n, k, seed, quant::Format::kW4Afp8).matrix;
    };
    for (int e = 0; e < kExperts; ++e) {
      gate_up.push_back(make(kInner, kHidden));
      gate_up.push_back(make(kInner, kHidden));
      down.push_back(make(kHidden, kInner));
    }
  }
};

// The layer for this rank's tokens: x [tokens, hidden] -> out. All ranks call it at the same time.
Status moe(const Layer& layer, exchange::Exchange& exchange, const float* x, int64_t tokens,
           float* out) {
  const ops::Backend& op = cpu::backend(cpu::detect_isa());
  ThreadPool threads(1);
  Arena memory;
  const ops::Context context{threads, memory};
  const auto new_rows = [&](const quant::Matrix& w, int64_t count) {
    quant::Rows rows{.format = quant::act_format(w), .count = count, .k = w.k};
    rows.data = memory.alloc_bytes(static_cast<size_t>(count * rows.row_bytes()));
    return rows;
  };

  // Each token's experts, by a softmax over the router's scores.
  auto* ids = memory.alloc<int32_t>(tokens * kTopk);
  auto* weights = memory.alloc<float>(tokens * kTopk);
  op.route({.x = x,
            .tokens = tokens,
            .gate = layer.router.matrix,
            .bias = nullptr,
            .scoring = ops::Scoring::kSoftmax,
            .method = ops::TopkMethod::kGreedy,
            .groups = 1,
            .topk_groups = 1,
            .topk = kTopk,
            .normalise = true,
            .scaling = 1,
            .ids = ids,
            .weights = weights},
           context);

  // Tokens go to their experts' ranks, quantised once, as GEMM 1 reads them.
  quant::Rows rows = new_rows(layer.gate_up[0], tokens);
  op.quantise({x, kHidden, rows}, context);
  ASSIGN_OR_RETURN(const ExpertRows lists, exchange.dispatch({.rows = rows.data,
                                                              .row_bytes = rows.row_bytes(),
                                                              .tokens = tokens,
                                                              .ids = ids,
                                                              .weights = weights}));
  rows.data = const_cast<std::byte*>(lists.rows);  // in place, all ranks' tokens; only read
  rows.count = lists.slots;

  // This rank's experts: gate and up, SwiGLU, down.
  const int first = lists.rank * lists.local_experts;
  auto* gate_up = memory.alloc<float>(lists.entries * 2 * kInner);
  op.grouped_gemm({rows, lists.row_index, lists.offsets, lists.local_experts,
                   layer.gate_up.data() + 2 * first, 2, gate_up},
                  context);
  const quant::Rows h = new_rows(layer.down[0], lists.entries);
  op.swiglu_quantise({gate_up, lists.entries, kInner, h}, context);
  auto* y = memory.alloc<float>(lists.entries * kHidden);
  op.grouped_gemm({h, nullptr, lists.offsets, lists.local_experts, layer.down.data() + first, 1, y},
                  context);

  // One sum a token leaves each rank; at home they are added.
  auto* parts = exchange.parts_buffer<float>();
  op.moe_reduce({lists, y, kHidden, parts}, context);
  ASSIGN_OR_RETURN(const CombinedParts combined, exchange.combine(0, parts));
  op.moe_combine({combined, nullptr, tokens, kHidden, out}, context);
  return Status::ok();
}

// The layer over `ranks` ranks, tokens in equal shares. Returns [tokens, hidden].
std::vector<float> run(const Layer& layer, int ranks, const std::vector<float>& x) {
  const exchange::Options options{
      .experts = kExperts,
      .topk = kTopk,
      .hidden = kHidden,
      .widest_row_bytes = quant::act_row_bytes(quant::act_format(layer.gate_up[0]), kHidden),
      .max_dispatch_tokens = kTokens,
      .max_normal_tokens = kTokens};
  const auto group = exchange::make_local_group(ranks, options.window_bytes(ranks));
  std::vector<float> out(x.size());
  std::vector<std::thread> threads;
  const int64_t share = kTokens / ranks;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      const auto exchange = exchange::make_exchange(group[static_cast<size_t>(r)], options);
      const int64_t at = r * share * kHidden;
      const Status status = moe(layer, *exchange, x.data() + at, share, out.data() + at);
      if (!status.is_ok()) std::fprintf(stderr, "rank %d: %s\n", r, status.message().c_str());
    });
  }
  for (std::thread& t : threads) t.join();
  return out;
}

}  // namespace

int main() {
  const Layer layer;
  const std::vector<float> x = random_floats(kTokens * kHidden, 0);
  const std::vector<float> one = run(layer, 1, x);
  const std::vector<float> two = run(layer, 2, x);
  const bool answered = std::count(one.begin(), one.end(), 0.0f) < kHidden;
  const bool same = std::memcmp(one.data(), two.data(), one.size() * sizeof(float)) == 0;
  std::printf("%d tokens, %d experts, top-%d: two ranks give %s\n", static_cast<int>(kTokens),
              kExperts, kTopk, same ? "the bits of one" : "OTHER BITS than one");
  return same && answered ? 0 : 1;
}
