// The router: logits by the GEMM, then a warp a token scores and chooses, as backends/reference
// does. Scores go through double as there, so equal logits give equal choices and weights.
#include "backends/cuda/gemm.h"
#include "backends/cuda/kernel.cuh"
#include "backends/cuda/ops.h"

namespace sortie::cuda {

namespace {

constexpr float kMasked = -INFINITY;

struct RouteArgs {
  const float* logits;
  int experts;
  const float* bias;
  ops::Scoring scoring;
  ops::TopkMethod method;
  int groups, topk_groups, topk;
  bool normalise;
  float scaling;
  int32_t* ids;
  float* weights;
};

// The index of the warp's largest value over `v` [n] in shared memory, the lower index first; every
// lane gets it.
__device__ int warp_argmax(const float* v, int n) {
  float best = kMasked;
  int at = n;
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kWarp) {
    if (v[i] > best || at == n) {
      best = v[i];
      at = i;
    }
  }
  for (int d = 16; d > 0; d /= 2) {
    const float other = __shfl_xor_sync(kAll, best, d);
    const int other_at = __shfl_xor_sync(kAll, at, d);
    const bool take =
        at == n || (other_at < n && (other > best || (other == best && other_at < at)));
    if (take) {
      best = other;
      at = other_at;
    }
  }
  return at;
}

__device__ double warp_total(double v) {
  for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(kAll, v, d);
  return v;
}

__device__ void score(float* s, int n, ops::Scoring scoring) {
  const int lane = static_cast<int>(threadIdx.x);
  if (scoring == ops::Scoring::kSigmoid) {
    for (int i = lane; i < n; i += kWarp)
      s[i] = static_cast<float>(1.0 / (1.0 + exp(-double{s[i]})));
    return;
  }
  float largest = kMasked;
  for (int i = lane; i < n; i += kWarp) largest = fmaxf(largest, s[i]);
  for (int d = 16; d > 0; d /= 2) largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, d));
  double total = 0;
  for (int i = lane; i < n; i += kWarp) total += exp(double{s[i]} - largest);
  total = warp_total(total);
  for (int i = lane; i < n; i += kWarp) {
    s[i] = static_cast<float>(exp(double{s[i]} - largest) / total);
  }
}

// A group's score: its best value, or the sum of its best two (noaux_tc).
__device__ float group_score(const float* choice, int n, bool two) {
  int best = 0;
  for (int i = 1; i < n; ++i) {
    if (choice[i] > choice[best]) best = i;
  }
  if (!two) return choice[best];
  float second = kMasked;
  for (int i = 0; i < n; ++i) {
    if (i != best) second = fmaxf(second, choice[i]);
  }
  return choice[best] + second;
}

__global__ void choose_experts(RouteArgs a) {
  extern __shared__ float space[];
  float* s = space;                   // [experts] scores
  float* choice = s + a.experts;      // [experts] what the choice is made by
  float* group = choice + a.experts;  // [groups]
  float* kept = group + a.groups;     // [groups]
  const int64_t t = blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x);
  for (int i = lane; i < a.experts; i += kWarp) s[i] = a.logits[t * a.experts + i];
  __syncwarp();
  score(s, a.experts, a.scoring);
  __syncwarp();
  for (int i = lane; i < a.experts; i += kWarp)
    choice[i] = a.bias == nullptr ? s[i] : s[i] + a.bias[i];
  __syncwarp();
  if (a.method != ops::TopkMethod::kGreedy) {
    const int size = a.experts / a.groups;
    for (int g = lane; g < a.groups; g += kWarp) {
      group[g] = group_score(choice + g * size, size, a.method == ops::TopkMethod::kNoauxTc);
      kept[g] = 0;
    }
    __syncwarp();
    for (int i = 0; i < a.topk_groups; ++i) {
      const int g = warp_argmax(group, a.groups);
      __syncwarp();
      if (lane == 0) {
        kept[g] = 1;
        group[g] = kMasked;
      }
      __syncwarp();
    }
    for (int i = lane; i < a.experts; i += kWarp) {
      if (kept[i / size] == 0) choice[i] = kMasked;
    }
    __syncwarp();
  }
  float sum = 0;
  for (int k = 0; k < a.topk; ++k) {
    const int e = warp_argmax(choice, a.experts);
    __syncwarp();
    sum += s[e];
    if (lane == 0) {
      choice[e] = kMasked;
      a.ids[t * a.topk + k] = e;
    }
    __syncwarp();
  }
  for (int k = lane; k < a.topk; k += kWarp) {
    float weight = s[a.ids[t * a.topk + k]];
    if (a.normalise) weight = weight / (sum + 1e-20f);
    a.weights[t * a.topk + k] = weight * a.scaling;
  }
}

}  // namespace

void route(const ops::RouteOf<bf16>& a, const Context& c) {
  if (a.tokens == 0) return;
  const Arena::Scope scope(c.scratch);
  const int64_t experts = a.gate.n;
  auto* logits = c.scratch.alloc<float>(a.tokens * experts);
  GemmArgs g{.x = reinterpret_cast<const std::byte*>(a.x),
             .x_row_bytes = a.gate.k * 2,
             .rows = static_cast<int>(a.tokens),
             .w = a.gate.codes,
             .w_row_bytes = a.gate.code_row_bytes(),
             .n = static_cast<int>(experts),
             .k = static_cast<int>(a.gate.k),
             .y32 = logits,
             .y_stride = experts};
  gemm(a.gate.format, g, c);
  const RouteArgs args{.logits = logits,
                       .experts = static_cast<int>(experts),
                       .bias = a.bias,
                       .scoring = a.scoring,
                       .method = a.method,
                       .groups = a.groups,
                       .topk_groups = a.topk_groups,
                       .topk = a.topk,
                       .normalise = a.normalise,
                       .scaling = a.scaling,
                       .ids = a.ids,
                       .weights = a.weights};
  const size_t shared = static_cast<size_t>(2 * experts + 2 * a.groups) * sizeof(float);
  SORTIE_LAUNCH(choose_experts, static_cast<unsigned>(a.tokens), kWarp, shared, c, args);
}

}  // namespace sortie::cuda
