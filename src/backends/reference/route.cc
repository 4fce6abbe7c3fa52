#include <algorithm>
#include <cmath>
#include <limits>

#include "backends/reference/dot.h"
#include "backends/reference/reference.h"

namespace sortie::reference {

namespace {

constexpr float kMasked = -std::numeric_limits<float>::infinity();

// The index of the largest value; the lower index wins ties.
int64_t argmax(const float* v, int64_t n) { return std::max_element(v, v + n) - v; }

// A group's score: its best value, or the sum of its best two (noaux_tc).
float group_score(const float* choice, int64_t n, ops::TopkMethod method) {
  const int64_t best = argmax(choice, n);
  if (method == ops::TopkMethod::kGroupLimitedGreedy) return choice[best];
  float second = kMasked;
  for (int64_t i = 0; i < n; ++i) {
    if (i != best) second = std::max(second, choice[i]);
  }
  return choice[best] + second;
}

// Sets the scores of all groups but the best topk_groups to -inf.
void mask_groups(const ops::Route& a, int64_t experts, float* choice, const ops::Context& c) {
  const int64_t size = experts / a.groups;
  auto* scores = c.scratch.alloc<float>(a.groups);
  auto* kept = c.scratch.alloc<bool>(a.groups);
  for (int g = 0; g < a.groups; ++g) {
    scores[g] = group_score(choice + g * size, size, a.method);
    kept[g] = false;
  }
  for (int i = 0; i < a.topk_groups; ++i) {
    const int64_t g = argmax(scores, a.groups);
    kept[g] = true;
    scores[g] = kMasked;
  }
  for (int g = 0; g < a.groups; ++g) {
    if (!kept[g]) std::fill_n(choice + g * size, size, kMasked);
  }
}

// Softmax or sigmoid in place.
void score(float* s, int64_t n, ops::Scoring scoring) {
  if (scoring == ops::Scoring::kSigmoid) {
    for (int64_t i = 0; i < n; ++i)
      s[i] = static_cast<float>(1.0 / (1.0 + std::exp(-double{s[i]})));
    return;
  }
  const float largest = *std::max_element(s, s + n);
  double total = 0;
  for (int64_t i = 0; i < n; ++i) total += std::exp(double{s[i]} - largest);
  for (int64_t i = 0; i < n; ++i) {
    s[i] = static_cast<float>(std::exp(double{s[i]} - largest) / total);
  }
}

}  // namespace

void route(const ops::Route& a, const ops::Context& c) {
  Arena::Scope scope(c.scratch);
  const int64_t experts = a.gate.n;
  auto* scores = c.scratch.alloc<float>(a.tokens * experts);
  auto* w = c.scratch.alloc<float>(a.gate.k);
  for (int64_t e = 0; e < experts; ++e) {
    weight_codes(a.gate, e, w);
    for (int64_t t = 0; t < a.tokens; ++t) {
      double sum = 0;
      for (int64_t k = 0; k < a.gate.k; ++k)
        sum += static_cast<double>(a.x[t * a.gate.k + k]) * w[k];
      scores[t * experts + e] = static_cast<float>(sum);
    }
  }
  auto* choice = c.scratch.alloc<float>(experts);
  for (int64_t t = 0; t < a.tokens; ++t) {
    Arena::Scope row_scope(c.scratch);
    float* s = scores + t * experts;
    score(s, experts, a.scoring);
    for (int64_t e = 0; e < experts; ++e) choice[e] = a.bias == nullptr ? s[e] : s[e] + a.bias[e];
    if (a.method != ops::TopkMethod::kGreedy) mask_groups(a, experts, choice, c);
    float sum = 0;
    for (int k = 0; k < a.topk; ++k) {
      const int64_t e = argmax(choice, experts);
      choice[e] = kMasked;
      a.ids[t * a.topk + k] = static_cast<int32_t>(e);
      a.weights[t * a.topk + k] = s[e];
      sum += s[e];
    }
    for (int k = 0; k < a.topk; ++k) {
      float& weight = a.weights[t * a.topk + k];
      if (a.normalise) weight /= sum + 1e-20f;
      weight *= a.scaling;
    }
  }
}

}  // namespace sortie::reference
