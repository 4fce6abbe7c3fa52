#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/scheduler.h"
#include "model/model.h"
#include "ops/ops.h"

namespace sortie::engine {

// log(sum of exp(x)) of at least one number: what log-softmax takes off.
double log_sum_exp(std::span<const float> x);

// From a step's logits to its tokens: the backend draws, and log-probabilities (log-softmax of the
// raw logits, before penalties and temperature) are read here for the requests that want them.
class Sampler {
 public:
  // logits [targets, vocabulary] as the model's forward gave them, overwritten. The result is valid
  // until the next call.
  Result<std::span<const Sampled>> sample(float* logits, std::span<const SampleTarget> targets,
                                          model::Model& model);

 private:
  std::vector<Sampled> sampled_;
  std::vector<ops::SampleRow> rows_;
  std::vector<int32_t> ids_;
  std::vector<float> raw_;  // copies of the rows whose log-probabilities are wanted
  std::vector<int32_t> order_;
};

}  // namespace sortie::engine
