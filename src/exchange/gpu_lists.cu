#include <cuda_runtime.h>

#include "exchange/gpu_lists.h"

namespace sortie::exchange {

namespace {

constexpr int kWarp = 32;
constexpr int kWarps = 8;  // experts of a block
constexpr unsigned kAll = 0xffffffffu;

// The lists of base/exchange_layout.h. Every block counts all ids; then each of its warps walks
// them in order for one expert, so that places come from counts of what stands before, never from a
// race. The warp of expert 0 writes what belongs to the slots.
__global__ void __launch_bounds__(kWarps* kWarp) make_lists(const __grid_constant__ ListArgs a) {
  extern __shared__ int counts[];  // [experts], then where each list begins
  const int entries = a.tokens * a.topk;
  const auto valid = [&](int id) { return id >= 0 && id < a.experts; };
  for (int e = static_cast<int>(threadIdx.x); e < a.experts; e += kWarps * kWarp) counts[e] = 0;
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < entries; i += kWarps * kWarp) {
    if (valid(a.ids[i])) atomicAdd(counts + a.ids[i], 1);
  }
  __syncthreads();

  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int expert = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / kWarp;
  if (expert >= a.experts) return;
  int begin = 0;
  for (int e = lane; e < expert; e += kWarp) begin += counts[e];
  begin = __reduce_add_sync(kAll, begin);
  if (lane == 0) {
    a.offsets[expert] = begin;
    if (expert == a.experts - 1) a.offsets[a.experts] = begin + counts[expert];
  }

  int own_before = 0;    // of this expert, before the ids at hand
  int valid_before = 0;  // of any
  for (int base = 0; base < entries; base += kWarp) {
    const int i = base + lane;
    const int id = i < entries ? a.ids[i] : -1;
    const unsigned all = __ballot_sync(kAll, valid(id));
    const unsigned own = __ballot_sync(kAll, id == expert);
    const unsigned before = (1u << lane) - 1;
    const int t = i / a.topk;
    const int k = i % a.topk;
    if (expert == 0 && i < entries && k == 0) {
      a.slot_offsets[t] = valid_before + __popc(all & before);
      bool any = false;
      for (int j = 0; j < a.topk; ++j) any = any || valid(a.ids[i + j]);
      a.present[t] = any ? 1 : 0;
    }
    if (id == expert) {
      const int entry = begin + own_before + __popc(own & before);
      a.row_index[entry] = t;
      a.row_weight[entry] = a.weights[i];
      // Its place in the slot: after the token's smaller ids, and equal ones of smaller k.
      int earlier = 0;  // valid ids of the token before k
      int rank = 0;
      for (int j = 0; j < a.topk; ++j) {
        const int other = a.ids[t * a.topk + j];
        if (!valid(other)) continue;
        if (j < k) ++earlier;
        if (other < id || (other == id && j < k)) ++rank;
      }
      const int slot_begin = valid_before + __popc(all & before) - earlier;
      a.slot_entries[slot_begin + rank] = entry;
    }
    own_before += __popc(own);
    valid_before += __popc(all);
  }
  if (expert == 0 && lane == 0) a.slot_offsets[a.tokens] = valid_before;
}

}  // namespace

const char* enqueue_lists(const ListArgs& a, void* stream) {
  const auto blocks = static_cast<unsigned>((a.experts + kWarps - 1) / kWarps);
  make_lists<<<blocks, kWarps * kWarp, static_cast<size_t>(a.experts) * sizeof(int),
               static_cast<cudaStream_t>(stream)>>>(a);
  const cudaError_t error = cudaPeekAtLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace sortie::exchange
