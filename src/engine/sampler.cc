#include "engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace sortie::engine {

namespace {

// The `count` best ids, the lower id first among equals. `order` is scratch.
void best(std::span<const float> x, double norm, size_t count, std::vector<int32_t>& order,
          std::vector<TokenLogprob>& out) {
  order.resize(x.size());
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + static_cast<int64_t>(count), order.end(),
                    [&](int32_t a, int32_t b) {
                      const float va = x[static_cast<size_t>(a)];
                      const float vb = x[static_cast<size_t>(b)];
                      return va != vb ? va > vb : a < b;
                    });
  for (size_t i = 0; i < count; ++i) {
    const int32_t id = order[i];
    out.push_back({id, static_cast<float>(x[static_cast<size_t>(id)] - norm)});
  }
}

bool wants_logprobs(const SamplingParams& p) { return p.logprobs || p.top_logprobs > 0; }

ops::SampleRow sample_row(const SampleTarget& t) {
  const SamplingParams& p = *t.sampling;
  const auto output = t.tokens.subspan(static_cast<size_t>(t.prompt_tokens));
  return {.temperature = p.temperature,
          .top_k = std::max(p.top_k, 0),
          .top_p = p.top_p,
          .min_p = p.min_p,
          .repetition_penalty = p.repetition_penalty,
          .presence_penalty = p.presence_penalty,
          .frequency_penalty = p.frequency_penalty,
          .seen = t.tokens.data(),
          .seen_count = static_cast<int64_t>(t.tokens.size()),
          .generated = output.data(),
          .generated_count = static_cast<int64_t>(output.size()),
          .seed = p.seed,
          .choice = p.choice,
          .position = static_cast<uint32_t>(t.tokens.size())};
}

}  // namespace

double log_sum_exp(std::span<const float> x) {
  const double largest = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (const float v : x) sum += std::exp(static_cast<double>(v) - largest);
  return largest + std::log(sum);
}

Result<std::span<const Sampled>> Sampler::sample(float* logits,
                                                 std::span<const SampleTarget> targets,
                                                 model::Model& model) {
  const int64_t vocabulary = model.config().vocab_size;
  const auto width = static_cast<size_t>(vocabulary);
  rows_.clear();
  raw_.clear();
  for (size_t i = 0; i < targets.size(); ++i) {
    rows_.push_back(sample_row(targets[i]));
    if (!wants_logprobs(*targets[i].sampling)) continue;
    ASSIGN_OR_RETURN(const float* row, model.on_host(logits + i * width, vocabulary));
    raw_.insert(raw_.end(), row, row + width);
  }
  ids_.resize(targets.size());
  sampled_.resize(targets.size());
  if (targets.empty()) return std::span<const Sampled>(sampled_);
  RETURN_IF_ERROR(model.sample({.logits = logits,
                                .rows = static_cast<int64_t>(targets.size()),
                                .vocabulary = vocabulary,
                                .params = rows_.data(),
                                .ids = ids_.data(),
                                .logprobs = nullptr}));

  std::span<const float> raw(raw_);
  for (size_t i = 0; i < targets.size(); ++i) {
    Sampled& s = sampled_[i];
    s.id = ids_[i];
    s.logprob = 0;
    s.top.clear();
    if (!wants_logprobs(*targets[i].sampling)) continue;
    const auto row = raw.first(width);
    raw = raw.subspan(width);
    const double norm = log_sum_exp(row);
    s.logprob = static_cast<float>(row[static_cast<size_t>(s.id)] - norm);
    best(row, norm, static_cast<size_t>(targets[i].sampling->top_logprobs), order_, s.top);
  }
  return std::span<const Sampled>(sampled_);
}

}  // namespace sortie::engine
