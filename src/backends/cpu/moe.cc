// The combine tree (docs/numerics.md): a rank's part is one node, home adds the parts upwards. Both
// walk the same tree over pieces of columns, so a node fits the stack and threads can share a row.
#include <algorithm>
#include <array>

#include "backends/cpu/drivers.h"

namespace sortie::cpu {

namespace {

constexpr int64_t kColumns = 512;

// Sums nodes [begin, end) into sum[count]: leaf(node, sum) fills one and says whether there was
// anything. An empty node is left out; a node with one child is that child.
template <typename Leaf>
bool tree(int begin, int end, int64_t count, float* sum, const Leaf& leaf, const Kernels& k) {
  if (end - begin == 1) return leaf(begin, sum);
  std::array<float, kColumns> right;
  const int middle = begin + (end - begin) / 2;
  const bool has_left = tree(begin, middle, count, sum, leaf, k);
  const bool has_right = tree(middle, end, count, has_left ? right.data() : sum, leaf, k);
  if (has_left && has_right) k.add(right.data(), count, sum);
  return has_left || has_right;
}

// fn(row, first column, columns) over all rows, spread over threads.
template <typename F>
void each_piece(const ops::Context& c, int64_t rows, int64_t columns, int64_t work, const F& fn) {
  const int64_t pieces = quant::ceil_div(columns, kColumns);
  run_shared(c, work, [&](int thread, int threads) {
    const Share share = share_of(rows * pieces, thread, threads);
    for (int64_t i = share.begin; i < share.end; ++i) {
      const int64_t first = i % pieces * kColumns;
      fn(i / pieces, first, std::min(kColumns, columns - first));
    }
  });
}

}  // namespace

void moe_reduce(const ops::MoeReduce& a, const ops::Context& c, const Kernels& k) {
  const ExpertRows& l = a.lists;
  const int leaves = combine_leaves(l.ranks);
  const int own = leaves / l.ranks;
  Arena::Scope scope(c.scratch);
  auto* leaf_of = c.scratch.alloc<int32_t>(l.entries);
  for (int e = 0; e < l.local_experts; ++e) {
    const int64_t id = int64_t{l.rank} * l.local_experts + e;
    std::fill(leaf_of + l.offsets[e], leaf_of + l.offsets[e + 1],
              static_cast<int32_t>(id * leaves / l.experts));
  }
  each_piece(
      c, l.slots, a.hidden, l.entries * a.hidden,
      [&](int64_t slot, int64_t first, int64_t columns) {
        const int32_t* entry = l.slot_entries + l.slot_offsets[slot];
        const int32_t* end = l.slot_entries + l.slot_offsets[slot + 1];
        if (entry == end) return;
        // Leaves are asked for in ascending order, and so are a slot's entries.
        const auto leaf = [&](int node, float* sum) {
          bool first_one = true;
          for (; entry != end && leaf_of[*entry] == node; ++entry) {
            k.weigh(a.y + *entry * a.hidden + first, l.row_weight[*entry], columns, first_one, sum);
            first_one = false;
          }
          return !first_one;
        };
        tree(l.rank * own, (l.rank + 1) * own, columns, a.parts + slot * a.hidden + first, leaf, k);
      });
}

void moe_combine(const ops::MoeCombine& a, const ops::Context& c, const Kernels& k) {
  const CombinedParts& p = a.parts;
  const auto* rows = p.rows_of<float>();
  each_piece(c, a.tokens, a.hidden, a.tokens * a.hidden * p.ranks,
             [&](int64_t t, int64_t first, int64_t columns) {
               float* out = a.out + t * a.hidden + first;
               const auto part = [&](int rank, float* sum) {
                 const int64_t slot = rank * p.max_tokens + t;
                 if (p.present[slot] == 0) return false;
                 std::copy_n(rows + slot * a.hidden + first, columns, sum);
                 return true;
               };
               if (!tree(0, p.ranks, columns, out, part, k)) std::fill_n(out, columns, 0.0f);
               if (a.shared != nullptr) k.add(a.shared + t * a.hidden + first, columns, out);
             });
}

}  // namespace sortie::cpu
