// The combine tree (docs/numerics.md) in bf16: every node is rounded once. A block a row, a thread
// a column at a time.
#include "backends/cuda/kernel.cuh"
#include "backends/cuda/ops.h"

namespace sortie::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kMostNodes = 8;     // of a rank, and ranks
constexpr int kMostEntries = 64;  // of a slot: top-k, repeats included

// The root over `count` (a power of two) rounded nodes, of which `present` says which are there.
__device__ float tree_root(float (&node)[kMostNodes], unsigned present, int count) {
#pragma unroll
  for (int step = 1; step < kMostNodes; step *= 2) {
    if (step >= count) break;
#pragma unroll
    for (int i = 0; i + step < kMostNodes; i += 2 * step) {
      if (i + step >= count) continue;
      const bool left = (present >> i & 1u) != 0;
      const bool right = (present >> (i + step) & 1u) != 0;
      if (left && right) {
        node[i] = f32(round_bf16(node[i] + node[i + step]));
      } else if (right) {
        node[i] = node[i + step];
      }
      if (right) present |= 1u << i;
    }
  }
  return node[0];
}

__global__ void moe_reduce_rows(ExpertRows l, const bf16* y, int64_t hidden, bf16* parts, int nodes,
                                int leaves) {
  __shared__ int32_t entry[kMostEntries];
  __shared__ int node_of[kMostEntries];
  __shared__ float weight[kMostEntries];
  const int64_t slot = blockIdx.x;
  const int first = l.slot_offsets[slot];
  const int count = l.slot_offsets[slot + 1] - first;
  if (count == 0) return;
  if (static_cast<int>(threadIdx.x) < count) {
    const int32_t at = l.slot_entries[first + threadIdx.x];
    int low = 0;  // the expert whose list holds the entry
    int high = l.local_experts;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (l.offsets[middle] <= at ? low : high) = middle;
    }
    entry[threadIdx.x] = at;
    weight[threadIdx.x] = l.row_weight[at];
    const int64_t id = int64_t{l.rank} * l.local_experts + low;
    node_of[threadIdx.x] = static_cast<int>(id * leaves / l.experts) - l.rank * nodes;
  }
  __syncthreads();
  for (int64_t i = threadIdx.x; i < hidden; i += kThreads) {
    float node[kMostNodes] = {};
    unsigned present = 0;
    for (int j = 0; j < count; ++j) {
      const float term = weight[j] * f32(y[entry[j] * hidden + i]);
#pragma unroll
      for (int n = 0; n < kMostNodes; ++n) {
        if (n == node_of[j]) node[n] = (present >> n & 1u) != 0 ? node[n] + term : term;
      }
      present |= 1u << node_of[j];
    }
#pragma unroll
    for (int n = 0; n < kMostNodes; ++n) node[n] = f32(round_bf16(node[n]));
    parts[slot * hidden + i] = round_bf16(tree_root(node, present, nodes));
  }
}

__global__ void moe_combine_rows(CombinedParts p, const bf16* rows, const bf16* shared,
                                 int64_t hidden, bf16* out) {
  const int64_t t = blockIdx.x;
  unsigned present = 0;
  for (int r = 0; r < p.ranks; ++r)
    present |= (p.present[r * p.max_tokens + t] != 0 ? 1u : 0u) << r;
  for (int64_t i = threadIdx.x; i < hidden; i += kThreads) {
    float node[kMostNodes] = {};
#pragma unroll
    for (int r = 0; r < kMostNodes; ++r) {
      if ((present >> r & 1u) != 0) node[r] = f32(rows[(r * p.max_tokens + t) * hidden + i]);
    }
    const float root = present != 0 ? tree_root(node, present, p.ranks) : 0.0f;
    out[t * hidden + i] = round_bf16(shared == nullptr ? root : root + f32(shared[t * hidden + i]));
  }
}

}  // namespace

void moe_reduce(const ops::MoeReduceOf<bf16>& a, const Context& c) {
  if (a.lists.slots == 0 || a.lists.entries == 0) return;
  const int leaves = combine_leaves(a.lists.ranks);
  CHECK(leaves / a.lists.ranks <= kMostNodes && a.lists.entries <= a.lists.slots * kMostEntries);
  SORTIE_LAUNCH(moe_reduce_rows, static_cast<unsigned>(a.lists.slots), kThreads, 0, c, a.lists, a.y,
                a.hidden, a.parts, leaves / a.lists.ranks, leaves);
}

void moe_combine(const ops::MoeCombineOf<bf16>& a, const Context& c) {
  if (a.tokens == 0) return;
  CHECK(a.parts.ranks <= kMostNodes);
  SORTIE_LAUNCH(moe_combine_rows, static_cast<unsigned>(a.tokens), kThreads, 0, c, a.parts,
                a.parts.rows_of<bf16>(), a.shared, a.hidden, a.out);
}

}  // namespace sortie::cuda
