#include "backends/cpu/test_support.h"

namespace sortie::cpu {
namespace {

class Moe : public IsaTest {};

struct RouteCase {
  ops::Scoring scoring;
  ops::TopkMethod method;
  int groups;
  int topk_groups;
  int topk;
  bool bias;
  bool normalise;
};
constexpr RouteCase kRoutes[] = {
    {ops::Scoring::kSoftmax, ops::TopkMethod::kGreedy, 1, 1, 6, false, false},
    {ops::Scoring::kSoftmax, ops::TopkMethod::kGroupLimitedGreedy, 8, 3, 6, false, false},
    {ops::Scoring::kSigmoid, ops::TopkMethod::kNoauxTc, 8, 4, 8, true, true},
    {ops::Scoring::kSigmoid, ops::TopkMethod::kNoauxTc, 1, 1, 8, true, true},
    {ops::Scoring::kSigmoid, ops::TopkMethod::kGreedy, 1, 1, 1, false, true},
};

// Small integers make logits exact in any order of sums, with many ties; so choice and weights must
// be the reference's, bit for bit.
TEST_P(Moe, RouteEqualsReferenceOnExactLogits) {
  Random random(9);
  for (const RouteCase& r : kRoutes) {
    for (const quant::Format format : {quant::Format::kF32, quant::Format::kBf16}) {
      for (const int64_t tokens : {0, 1, 3, 50}) {
        const int64_t experts = 64;
        const int64_t hidden = 70;
        Weights gate(format, experts, hidden, random);
        for (int64_t i = 0; i < experts * hidden; ++i) {
          const auto w = static_cast<float>(random.below(3) - 1) / 8;
          if (format == quant::Format::kF32) {
            reinterpret_cast<float*>(gate.codes.data())[i] = w;
          } else {
            reinterpret_cast<bf16*>(gate.codes.data())[i] = to_bf16(w);
          }
        }
        std::vector<float> x(static_cast<size_t>(tokens * hidden));
        for (float& v : x) v = static_cast<float>(random.below(5) - 2);
        std::vector<float> bias(static_cast<size_t>(experts));
        for (float& v : bias) v = static_cast<float>(random.below(3)) / 4;
        const auto size = static_cast<size_t>(tokens * r.topk);
        std::vector<int32_t> ids[2] = {std::vector<int32_t>(size), std::vector<int32_t>(size)};
        std::vector<float> weights[2] = {std::vector<float>(size), std::vector<float>(size)};
        ops::Route args{.x = x.data(),
                        .tokens = tokens,
                        .gate = gate.matrix,
                        .bias = r.bias ? bias.data() : nullptr,
                        .scoring = r.scoring,
                        .method = r.method,
                        .groups = r.groups,
                        .topk_groups = r.topk_groups,
                        .topk = r.topk,
                        .normalise = r.normalise,
                        .scaling = 2.5f,
                        .ids = ids[0].data(),
                        .weights = weights[0].data()};
        Machine one(1);
        reference::route(args, one.context);
        args.ids = ids[1].data();
        args.weights = weights[1].data();
        for (int threads = 1; threads <= 3; ++threads) {
          Machine machine(threads);
          op().route(args, machine.context);
          EXPECT_TRUE(same_bits(ids[1], ids[0]));
          EXPECT_TRUE(same_bits(weights[1], weights[0]));
        }
      }
    }
  }
}

// The lists of one rank for tokens with random experts, as an exchange would make them.
struct Lists {
  Lists(int ranks, int rank, int experts, int64_t max_tokens, const std::vector<int32_t>& ids,
        const std::vector<float>& weights, int topk) {
    const int local = experts / ranks;
    const auto tokens = static_cast<int64_t>(ids.size()) / topk;  // all of source rank 0
    rows = {.ranks = ranks,
            .rank = rank,
            .experts = experts,
            .local_experts = local,
            .max_tokens = max_tokens,
            .slots = ranks * max_tokens};
    std::vector<std::vector<int32_t>> by_slot(static_cast<size_t>(rows.slots));
    offsets.push_back(0);
    for (int e = rank * local; e < (rank + 1) * local; ++e) {
      for (int64_t t = 0; t < tokens; ++t) {
        for (int k = 0; k < topk; ++k) {
          if (ids[static_cast<size_t>(t * topk + k)] != e) continue;
          by_slot[static_cast<size_t>(t)].push_back(static_cast<int32_t>(index.size()));
          index.push_back(static_cast<int32_t>(t));
          weight.push_back(weights[static_cast<size_t>(t * topk + k)]);
          expert.push_back(e);
        }
      }
      offsets.push_back(static_cast<int32_t>(index.size()));
    }
    slot_offsets.push_back(0);
    for (const auto& entries : by_slot) {
      slot_entries.insert(slot_entries.end(), entries.begin(), entries.end());
      slot_offsets.push_back(static_cast<int32_t>(slot_entries.size()));
    }
    rows.entries = static_cast<int64_t>(index.size());
    rows.offsets = offsets.data();
    rows.row_index = index.data();
    rows.row_weight = weight.data();
    rows.slot_offsets = slot_offsets.data();
    rows.slot_entries = slot_entries.data();
  }
  std::vector<int32_t> offsets, index, slot_offsets, slot_entries, expert;
  std::vector<float> weight;
  ExpertRows rows;
};

// Reduce on every rank and combine at home: equal to the reference, and the same bits for 1, 2, 4
// and 8 ranks.
TEST_P(Moe, ReduceAndCombineAreTheSameTreeForAnyRanks) {
  Random random(10);
  for (const int64_t hidden : {5, 512, 1300}) {
    const int experts = 24;
    const int topk = 6;
    const int64_t tokens = 9;
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < tokens * topk; ++i)
      ids.push_back(static_cast<int32_t>(random.below(experts)));
    std::fill_n(ids.begin(), topk, -1);  // token 0 goes nowhere
    const std::vector<float> weights = random.normals(tokens * topk);
    // One row an expert and token, so that all rank counts see the same.
    const std::vector<float> y = random.normals(experts * tokens * hidden);
    const std::vector<float> shared = random.normals(tokens * hidden);
    std::vector<float> first;
    for (const int ranks : {1, 2, 4, 8}) {
      const int64_t max_tokens = tokens + 2;
      std::vector<float> parts(static_cast<size_t>(ranks * max_tokens * hidden), kNan);
      std::vector<uint8_t> present(static_cast<size_t>(ranks * max_tokens), 0);
      for (int rank = 0; rank < ranks; ++rank) {
        const Lists lists(ranks, rank, experts, max_tokens, ids, weights, topk);
        std::vector<float> rows;
        for (int64_t i = 0; i < lists.rows.entries; ++i) {
          const auto at = (lists.expert[static_cast<size_t>(i)] * tokens +
                           lists.index[static_cast<size_t>(i)]) *
                          hidden;
          rows.insert(rows.end(), y.begin() + at, y.begin() + at + hidden);
        }
        std::vector<float> expected(static_cast<size_t>(lists.rows.slots * hidden), 3.0f);
        std::vector<float> got = expected;  // parts of slots without entries are left alone
        Machine one(1);
        reference::moe_reduce({lists.rows, rows.data(), hidden, expected.data()}, one.context);
        for (int threads = 1; threads <= 3; ++threads) {
          Machine machine(threads);
          op().moe_reduce({lists.rows, rows.data(), hidden, got.data()}, machine.context);
          ASSERT_TRUE(same_bits(got, expected)) << ranks << " ranks, rank " << rank;
        }
        for (int64_t t = 0; t < tokens; ++t) {
          const auto slot = static_cast<size_t>(t);
          if (lists.slot_offsets[slot] == lists.slot_offsets[slot + 1]) continue;
          present[static_cast<size_t>(rank * max_tokens + t)] = 1;
          std::copy_n(got.begin() + t * hidden, hidden,
                      parts.begin() + (rank * max_tokens + t) * hidden);
        }
      }
      const CombinedParts combined{
          ranks, max_tokens, reinterpret_cast<const std::byte*>(parts.data()), present.data()};
      for (const float* s : {static_cast<const float*>(nullptr), shared.data()}) {
        std::vector<float> expected(static_cast<size_t>(tokens * hidden));
        std::vector<float> got(expected.size());
        Machine one(1);
        reference::moe_combine({combined, s, tokens, hidden, expected.data()}, one.context);
        Machine machine(2);
        op().moe_combine({combined, s, tokens, hidden, got.data()}, machine.context);
        ASSERT_TRUE(same_bits(got, expected)) << ranks;
        if (s == nullptr) continue;
        if (first.empty()) first = got;
        EXPECT_TRUE(same_bits(got, first)) << ranks << " ranks";
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, Moe, testing::ValuesIn(all_isas()), isa_parameter);

}  // namespace
}  // namespace sortie::cpu
