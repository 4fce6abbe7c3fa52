#include <algorithm>
#include <array>
#include <cmath>

#include "backends/reference/reference.h"

namespace sortie::reference {

namespace {

// Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), first
// word: a pure function of (seed, choice, position), so noise depends on nothing else.
uint32_t philox(uint64_t seed, uint32_t choice, uint32_t position) {
  std::array<uint32_t, 4> x = {position, choice, 0, 0};
  std::array<uint32_t, 2> key = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * x[0];
    const uint64_t b = uint64_t{0xCD9E8D57u} * x[2];
    x = {static_cast<uint32_t>(b >> 32) ^ x[1] ^ key[0], static_cast<uint32_t>(b),
         static_cast<uint32_t>(a >> 32) ^ x[3] ^ key[1], static_cast<uint32_t>(a)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return x[0];
}

void penalise(const ops::SampleRow& p, float* logits, const ops::Context& c) {
  Arena::Scope scope(c.scratch);
  const auto sorted = [&](const int32_t* ids, int64_t count) {
    auto* copy = c.scratch.alloc<int32_t>(count);
    std::copy_n(ids, count, copy);
    std::sort(copy, copy + count);
    return copy;
  };
  if (p.repetition_penalty != 1 && p.seen_count > 0) {
    const int32_t* ids = sorted(p.seen, p.seen_count);
    for (int64_t i = 0; i < p.seen_count; ++i) {
      if (i > 0 && ids[i] == ids[i - 1]) continue;
      float& logit = logits[ids[i]];
      logit = logit > 0 ? logit / p.repetition_penalty : logit * p.repetition_penalty;
    }
  }
  if ((p.presence_penalty != 0 || p.frequency_penalty != 0) && p.generated_count > 0) {
    const int32_t* ids = sorted(p.generated, p.generated_count);
    for (int64_t i = 0; i < p.generated_count;) {
      int64_t end = i;
      while (end < p.generated_count && ids[end] == ids[i]) ++end;
      logits[ids[i]] -= p.presence_penalty + p.frequency_penalty * static_cast<float>(end - i);
      i = end;
    }
  }
}

// One draw from softmax(logits / temperature), cut by top-k, top-p and min-p in that order over the
// probabilities in descending order (lower id first among equals), as SGLang cuts them.
int32_t draw(const ops::SampleRow& p, const float* logits, int64_t n, const ops::Context& c) {
  Arena::Scope scope(c.scratch);
  auto* order = c.scratch.alloc<int32_t>(n);
  auto* probability = c.scratch.alloc<double>(n);
  for (int64_t i = 0; i < n; ++i) order[i] = static_cast<int32_t>(i);
  std::sort(order, order + n, [&](int32_t a, int32_t b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  });
  const double largest = logits[order[0]];
  double total = 0;
  for (int64_t i = 0; i < n; ++i) {
    total += probability[i] = std::exp((logits[order[i]] - largest) / p.temperature);
  }
  const int64_t most = p.top_k > 0 ? std::min<int64_t>(p.top_k, n) : n;
  double before = 0;
  double kept = 0;
  int64_t count = 0;
  for (; count < most; ++count) {
    if (count > 0 && (before / total > p.top_p || probability[count] < p.min_p * probability[0]))
      break;
    before += probability[count];
    kept += probability[count];
  }
  const double target = philox(p.seed, p.choice, p.position) * 0x1p-32 * kept;
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    sum += probability[i];
    if (sum > target) return order[i];
  }
  return order[count - 1];
}

double log_sum_exp(const float* x, int64_t n) {
  const double largest = *std::max_element(x, x + n);
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += std::exp(x[i] - largest);
  return largest + std::log(sum);
}

}  // namespace

void sample(const ops::Sample& a, const ops::Context& c) {
  for (int64_t r = 0; r < a.rows; ++r) {
    Arena::Scope scope(c.scratch);
    const ops::SampleRow& p = a.params[r];
    float* logits = a.logits + r * a.vocabulary;
    const double norm = a.logprobs != nullptr ? log_sum_exp(logits, a.vocabulary) : 0;
    const float* raw = logits;
    if (a.logprobs != nullptr) {
      auto* copy = c.scratch.alloc<float>(a.vocabulary);
      std::copy_n(logits, a.vocabulary, copy);
      raw = copy;
    }
    penalise(p, logits, c);
    a.ids[r] = p.temperature <= 0
                   ? static_cast<int32_t>(std::max_element(logits, logits + a.vocabulary) - logits)
                   : draw(p, logits, a.vocabulary, c);
    if (a.logprobs != nullptr) a.logprobs[r] = static_cast<float>(raw[a.ids[r]] - norm);
  }
}

}  // namespace sortie::reference
