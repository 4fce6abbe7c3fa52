// Sampling: a block a row. Greedy is one pass. A draw needs no sorting: the kept tokens are a
// prefix of the descending order (lower id first among equals), so the prefix's end and then the
// drawn token are found by bisecting over that order's keys, each step counting and weighing the
// tokens at or above a key. All sums run by one fixed tree, so a draw depends on its row alone.
#include "backends/cuda/kernel.cuh"
#include "backends/cuda/ops.h"

namespace sortie::cuda {

namespace {

constexpr int kThreads = 1024;

// Philox 4x32-10, first word (Salmon et al., SC 2011), as backends/reference/sample.cc.
__device__ uint32_t philox(uint64_t seed, uint32_t choice, uint32_t position) {
  uint32_t x[4] = {position, choice, 0, 0};
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * x[0];
    const uint64_t b = uint64_t{0xCD9E8D57u} * x[2];
    const uint32_t y[4] = {static_cast<uint32_t>(b >> 32) ^ x[1] ^ key[0], static_cast<uint32_t>(b),
                           static_cast<uint32_t>(a >> 32) ^ x[3] ^ key[1],
                           static_cast<uint32_t>(a)};
    for (int i = 0; i < 4; ++i) x[i] = y[i];
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return x[0];
}

// A token's place in the descending order as a number: larger comes first, no two are equal.
__device__ uint64_t order_key(float logit, int id) {
  uint32_t bits = __float_as_uint(logit == 0 ? 0.0f : logit);  // -0 and 0 are equal logits
  bits = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(bits) << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}
__device__ int id_of(uint64_t key) {
  return static_cast<int>(0xffffffffu - static_cast<uint32_t>(key));
}

struct Weighed {
  double mass;
  int count;
};

struct Space {
  double mass[kThreads / kWarp];
  uint64_t key[kThreads / kWarp];
  int count[kThreads / kWarp];
};

__device__ Weighed block_total(Weighed v, Space& space) {
  const auto warp_total = [&] {
    for (int d = 16; d > 0; d /= 2) {
      v.mass += __shfl_xor_sync(kAll, v.mass, d);
      v.count += __shfl_xor_sync(kAll, v.count, d);
    }
  };
  warp_total();
  if (threadIdx.x % kWarp == 0) {
    space.mass[threadIdx.x / kWarp] = v.mass;
    space.count[threadIdx.x / kWarp] = v.count;
  }
  __syncthreads();
  v = {space.mass[threadIdx.x % kWarp], space.count[threadIdx.x % kWarp]};
  warp_total();
  __syncthreads();
  return v;
}

__device__ uint64_t block_largest(uint64_t v, Space& space) {
  const auto warp_largest = [&] {
    for (int d = 16; d > 0; d /= 2) v = max(v, __shfl_xor_sync(kAll, v, d));
  };
  warp_largest();
  if (threadIdx.x % kWarp == 0) space.key[threadIdx.x / kWarp] = v;
  __syncthreads();
  v = space.key[threadIdx.x % kWarp];
  warp_largest();
  __syncthreads();
  return v;
}

__device__ uint64_t largest_key(const float* logits, int n, Space& space) {
  uint64_t best = 0;
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) {
    best = max(best, order_key(logits[i], i));
  }
  return block_largest(best, space);
}

// log of the sum of exp(x - largest), largest aside.
__device__ double log_sum(const float* x, float largest, int n, Space& space) {
  Weighed sum{0, 0};
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) {
    sum.mass += exp(static_cast<double>(x[i]) - largest);
  }
  return log(block_total(sum, space).mass);
}

// `counts` [n] are zeros and become zeros again.
__device__ void penalise(const ops::SampleRow& p, float* logits, int32_t* counts) {
  const auto first = static_cast<int64_t>(threadIdx.x);
  if (p.repetition_penalty != 1) {
    for (int64_t i = first; i < p.seen_count; i += kThreads) {
      const int32_t id = p.seen[i];
      if (atomicExch(counts + id, 1) != 0) continue;
      const float logit = logits[id];
      logits[id] = logit > 0 ? logit / p.repetition_penalty : logit * p.repetition_penalty;
    }
    __syncthreads();
    for (int64_t i = first; i < p.seen_count; i += kThreads) counts[p.seen[i]] = 0;
    __syncthreads();
  }
  if (p.presence_penalty != 0 || p.frequency_penalty != 0) {
    for (int64_t i = first; i < p.generated_count; i += kThreads) {
      atomicAdd(counts + p.generated[i], 1);
    }
    __syncthreads();
    for (int64_t i = first; i < p.generated_count; i += kThreads) {
      const int32_t id = p.generated[i];
      const int32_t times = atomicExch(counts + id, 0);
      if (times == 0) continue;
      logits[id] -= p.presence_penalty + p.frequency_penalty * static_cast<float>(times);
    }
    __syncthreads();
  }
}

// How much stands at or above a key, and whether the key's own token is in the prefix that is kept.
struct Row {
  const float* logits;
  int n;
  double largest;  // logit
  double temperature;

  __device__ double probability(float logit) const {
    return exp((static_cast<double>(logit) - largest) / temperature);
  }
  __device__ Weighed at_or_above(uint64_t key, Space& space) const {
    Weighed sum{0, 0};
    for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) {
      if (order_key(logits[i], i) < key) continue;
      sum.mass += probability(logits[i]);
      ++sum.count;
    }
    return block_total(sum, space);
  }
};

__device__ float logit_of(uint64_t key) {
  auto bits = static_cast<uint32_t>(key >> 32);
  bits = (bits & 0x80000000u) != 0 ? bits & 0x7fffffffu : ~bits;
  return __uint_as_float(bits);
}

// The smallest key for which `keep(token's key, what stands above it)` holds; it holds for the
// largest and for a prefix of the order.
template <typename Keep>
__device__ uint64_t last_kept(const Row& row, uint64_t best, Space& space, const Keep& keep) {
  uint64_t kept = best;  // a token's key for which it holds
  uint64_t below = 0;    // keys at or below which no token is kept
  while (true) {
    // The next token at or above the middle of what is open.
    const uint64_t middle = below + (kept - below) / 2;
    uint64_t next = 0;  // the smallest token key above `middle`, as its complement's largest
    for (int i = static_cast<int>(threadIdx.x); i < row.n; i += kThreads) {
      const uint64_t key = order_key(row.logits[i], i);
      if (key > middle) next = max(next, ~key);
    }
    const uint64_t candidate = ~block_largest(next, space);
    if (candidate == kept) {
      // No token between the middle and `kept`.
      if (middle == below) return kept;
      // Look further down, unless nothing is left there.
      uint64_t under = 0;
      for (int i = static_cast<int>(threadIdx.x); i < row.n; i += kThreads) {
        const uint64_t key = order_key(row.logits[i], i);
        if (key <= middle && key > below) under = max(under, key);
      }
      under = block_largest(under, space);
      if (under == 0) return kept;
      if (!keep(under, row.at_or_above(under + 1, space))) return kept;
      kept = under;
      continue;
    }
    if (keep(candidate, row.at_or_above(candidate + 1, space))) {
      kept = candidate;
    } else {
      below = candidate;
    }
  }
}

__device__ int draw(const ops::SampleRow& p, const Row& row, uint64_t best, Space& space) {
  const Weighed all = row.at_or_above(0, space);
  const int most = p.top_k > 0 ? min(p.top_k, row.n) : row.n;
  const uint64_t last = last_kept(row, best, space, [&](uint64_t key, const Weighed& above) {
    if (above.count == 0) return true;
    return above.count < most && !(above.mass / all.mass > p.top_p) &&
           !(row.probability(logit_of(key)) < p.min_p);
  });
  const double kept = row.at_or_above(last, space).mass;
  const double target = philox(p.seed, p.choice, p.position) * 0x1p-32 * kept;
  // The first token in the order at which the running mass passes the target: the last one that has
  // no more than the target above it.
  return id_of(last_kept(row, best, space, [&](uint64_t key, const Weighed& above) {
    return key >= last && above.mass <= target;
  }));
}

__global__ void __launch_bounds__(kThreads)
    sample_rows(float* all_logits, int n, const ops::SampleRow* params, int32_t* counts,
                int32_t* ids, float* logprobs, float* copies) {
  __shared__ Space space;
  const int64_t r = blockIdx.x;
  const ops::SampleRow p = params[r];
  float* logits = all_logits + r * n;
  double norm = 0;
  float* raw = nullptr;
  if (logprobs != nullptr) {
    raw = copies + r * n;
    const float largest = logit_of(largest_key(logits, n, space));
    norm = largest + log_sum(logits, largest, n, space);
    for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) raw[i] = logits[i];
  }
  penalise(p, logits, counts + r * n);
  const uint64_t best = largest_key(logits, n, space);
  int id = id_of(best);
  if (p.temperature > 0) {
    const Row row{logits, n, static_cast<double>(logit_of(best)), p.temperature};
    id = draw(p, row, best, space);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    ids[r] = id;
    if (logprobs != nullptr) logprobs[r] = static_cast<float>(raw[id] - norm);
  }
}

}  // namespace

void sample(const ops::Sample& a, const Context& c) {
  if (a.rows == 0) return;
  const Arena::Scope scope(c.scratch);
  const int64_t values = a.rows * a.vocabulary;
  auto* counts = c.scratch.alloc<int32_t>(values);
  cudaMemsetAsync(counts, 0, static_cast<size_t>(values) * sizeof(int32_t), stream_of(c));
  auto* copies = a.logprobs == nullptr ? nullptr : c.scratch.alloc<float>(values);
  SORTIE_LAUNCH(sample_rows, static_cast<unsigned>(a.rows), kThreads, 0, c, a.logits,
                static_cast<int>(a.vocabulary), a.params, counts, a.ids, a.logprobs, copies);
}

}  // namespace sortie::cuda
