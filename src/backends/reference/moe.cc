#include "backends/reference/reference.h"

namespace sortie::reference {

namespace {

// Sums nodes [begin, end) of a binary tree into `out` [hidden]: `leaf(i, out)` fills one and says
// whether there was anything. An empty node is left out; a node with one child is that child.
template <typename Leaf>
bool tree(int begin, int end, int64_t hidden, float* out, const Leaf& leaf, Arena& scratch) {
  if (end - begin == 1) return leaf(begin, out);
  Arena::Scope scope(scratch);
  const int middle = begin + (end - begin) / 2;
  auto* right = scratch.alloc<float>(hidden);
  const bool has_left = tree(begin, middle, hidden, out, leaf, scratch);
  const bool has_right = tree(middle, end, hidden, has_left ? right : out, leaf, scratch);
  if (has_left && has_right) {
    for (int64_t i = 0; i < hidden; ++i) out[i] += right[i];
  }
  return has_left || has_right;
}

}  // namespace

void moe_reduce(const ops::MoeReduce& a, const ops::Context& c) {
  const ExpertRows& l = a.lists;
  const int leaves = combine_leaves(l.ranks);
  const int own = leaves / l.ranks;
  // Which expert an entry belongs to: the lists are prefix sums.
  Arena::Scope scope(c.scratch);
  auto* expert = c.scratch.alloc<int32_t>(l.entries);
  for (int e = 0; e < l.local_experts; ++e) {
    for (int32_t i = l.offsets[e]; i < l.offsets[e + 1]; ++i)
      expert[i] = e + l.rank * l.local_experts;
  }
  for (int64_t slot = 0; slot < l.slots; ++slot) {
    const auto leaf = [&](int node, float* out) {
      bool any = false;
      for (int32_t j = l.slot_offsets[slot]; j < l.slot_offsets[slot + 1]; ++j) {
        const int32_t entry = l.slot_entries[j];
        if (int64_t{expert[entry]} * leaves / l.experts != node) continue;
        const float* y = a.y + entry * a.hidden;
        const float weight = l.row_weight[entry];
        for (int64_t i = 0; i < a.hidden; ++i)
          out[i] = any ? out[i] + weight * y[i] : weight * y[i];
        any = true;
      }
      return any;
    };
    if (l.slot_offsets[slot] == l.slot_offsets[slot + 1]) continue;
    tree(l.rank * own, (l.rank + 1) * own, a.hidden, a.parts + slot * a.hidden, leaf, c.scratch);
  }
}

void moe_combine(const ops::MoeCombine& a, const ops::Context& c) {
  const CombinedParts& p = a.parts;
  const auto* rows = p.rows_of<float>();
  for (int64_t t = 0; t < a.tokens; ++t) {
    float* out = a.out + t * a.hidden;
    const auto part = [&](int rank, float* sum) {
      const int64_t slot = rank * p.max_tokens + t;
      if (p.present[slot] == 0) return false;
      for (int64_t i = 0; i < a.hidden; ++i) sum[i] = rows[slot * a.hidden + i];
      return true;
    };
    const bool any = tree(0, p.ranks, a.hidden, out, part, c.scratch);
    for (int64_t i = 0; i < a.hidden; ++i) {
      const float root = any ? out[i] : 0.0f;
      out[i] = a.shared == nullptr ? root : root + a.shared[t * a.hidden + i];
    }
  }
}

}  // namespace sortie::reference
