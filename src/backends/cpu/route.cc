// Routing: the gate in fp32 by the linear's kernel, then scores and choice a token at a time.
#include <algorithm>
#include <cmath>
#include <limits>

#include "backends/cpu/drivers.h"

namespace sortie::cpu {

namespace {

constexpr float kMasked = -std::numeric_limits<float>::infinity();

// What one thread needs beside the logits.
struct Space {
  float* choice;  // [experts]
  float* groups;  // [groups]
  bool* kept;     // [groups]
};

// Softmax or sigmoid in place, in double and rounded once: a few hundred values a token.
void to_scores(float* s, int64_t n, ops::Scoring scoring) {
  if (scoring == ops::Scoring::kSigmoid) {
    for (int64_t i = 0; i < n; ++i)
      s[i] = static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(s[i]))));
    return;
  }
  const double largest = *std::max_element(s, s + n);
  double total = 0;
  for (int64_t i = 0; i < n; ++i) total += std::exp(s[i] - largest);
  for (int64_t i = 0; i < n; ++i) s[i] = static_cast<float>(std::exp(s[i] - largest) / total);
}

// noaux_tc ranks groups by the sum of their best two, group_limited_greedy by their best.
float group_score(const float* v, int64_t n, bool best_two) {
  float first = kMasked;
  float second = kMasked;
  for (int64_t i = 0; i < n; ++i) {
    if (v[i] > first) {
      second = first;
      first = v[i];
    } else {
      second = std::max(second, v[i]);
    }
  }
  return best_two ? first + second : first;
}

void mask_groups(const ops::Route& a, const Space& space) {
  const int64_t size = a.gate.n / a.groups;
  for (int g = 0; g < a.groups; ++g) {
    space.groups[g] =
        group_score(space.choice + g * size, size, a.method == ops::TopkMethod::kNoauxTc);
    space.kept[g] = false;
  }
  for (int i = 0; i < a.topk_groups; ++i) {
    const auto best = std::max_element(space.groups, space.groups + a.groups) - space.groups;
    space.kept[best] = true;
    space.groups[best] = kMasked;
  }
  for (int g = 0; g < a.groups; ++g) {
    if (!space.kept[g]) std::fill_n(space.choice + g * size, size, kMasked);
  }
}

void choose(const ops::Route& a, int64_t t, float* scores, const Space& space) {
  const int64_t experts = a.gate.n;
  to_scores(scores, experts, a.scoring);
  for (int64_t e = 0; e < experts; ++e) {
    space.choice[e] = a.bias == nullptr ? scores[e] : scores[e] + a.bias[e];
  }
  if (a.method != ops::TopkMethod::kGreedy) mask_groups(a, space);
  int32_t* ids = a.ids + t * a.topk;
  float* weights = a.weights + t * a.topk;
  float sum = 0;
  for (int i = 0; i < a.topk; ++i) {
    const auto best = std::max_element(space.choice, space.choice + experts) - space.choice;
    space.choice[best] = kMasked;
    ids[i] = static_cast<int32_t>(best);
    weights[i] = scores[best];
    sum += scores[best];
  }
  for (int i = 0; i < a.topk; ++i) {
    if (a.normalise) weights[i] /= sum + 1e-20f;
    weights[i] *= a.scaling;
  }
}

}  // namespace

void route(const ops::Route& a, const ops::Context& c, const Kernels& k) {
  Arena::Scope scope(c.scratch);
  const int64_t experts = a.gate.n;
  auto* scores = c.scratch.alloc<float>(a.tokens * experts);
  multiply_f32(a.x, a.tokens, a.gate.k, a.gate, scores, experts, c, k);
  auto* spaces = c.scratch.alloc<Space>(c.threads.size());
  for (int t = 0; t < c.threads.size(); ++t) {
    spaces[t] = {.choice = c.scratch.alloc<float>(experts),
                 .groups = c.scratch.alloc<float>(a.groups),
                 .kept = c.scratch.alloc<bool>(a.groups)};
  }
  run_shared(c, a.tokens <= 1 ? 0 : a.tokens * experts * a.topk, [&](int thread, int threads) {
    const Share share = share_of(a.tokens, thread, threads);
    for (int64_t t = share.begin; t < share.end; ++t)
      choose(a, t, scores + t * experts, spaces[thread]);
  });
}

}  // namespace sortie::cpu
