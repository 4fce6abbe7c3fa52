#include "model/model.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace sortie::model {

void Step::clear() {
  ids.clear();
  positions.clear();
  segments.clear();
  logit_rows.clear();
  any_prefill_anywhere = false;
}

Model::Model(Config config, std::shared_ptr<const Weights> weights, const ops::Backend& backend,
             ThreadPool& threads, exchange::Exchange& exchange, ModelOptions options)
    : config_(std::move(config)),
      weights_(std::move(weights)),
      ops_(backend),
      exchange_(exchange),
      options_(options),
      context_{threads, scratch_},
      softmax_scale_(static_cast<float>(config_.softmax_scale())),
      cos_sin_(config_.cos_sin_table(options.context_length)),
      laps_(times_) {
  const size_t layers = weights_->layers.size() + (options_.mtp ? weights_->mtp.size() : 0);
  const int64_t floats = int64_t{options_.pages} * options_.page_size * config_.latent_width();
  latents_ = AlignedBuffer(layers * static_cast<size_t>(floats) * sizeof(float));
}

Model::Shared Model::share(const Step& step) {
  const auto tokens = static_cast<int64_t>(step.ids.size());
  CHECK(step.positions.size() == step.ids.size());
  const auto** page_tables = alloc<const int32_t*>(tokens);
  int64_t row = 0;
  for (const Segment& s : step.segments) {
    CHECK(s.first_row == row, "segments cover a step's rows in order");
    for (int64_t i = 0; i < s.rows; ++i) page_tables[row++] = s.page_table;
  }
  CHECK(row == tokens, "segments cover all rows");
  return {tokens, step.positions.data(), page_tables, &step.segments, step.any_prefill_anywhere};
}

Result<Model::Output> Model::forward(const Step& step) {
  scratch_.reset();
  laps_.start();
  const Shared s = share(step);
  float* residual = alloc<float>(s.tokens * config_.hidden_size);
  ops_.embed({step.ids.data(), s.tokens, weights_->embed, residual}, context_);
  float* delta = alloc<float>(s.tokens * config_.hidden_size);
  for (size_t i = 0; i < weights_->layers.size(); ++i) {
    RETURN_IF_ERROR(decoder_layer(weights_->layers[i], static_cast<int>(i), s, residual, delta));
  }
  const float* hidden = add_norm(weights_->final_norm, delta, residual, s.tokens);
  laps_.lap(StepTimes::kRest);
  ++times_.steps;
  // A file cut under the mapping reads as zeros: say so instead of answering with them.
  if (weights_->checkpoint) RETURN_IF_ERROR(weights_->checkpoint->check());
  return head(weights_->lm_head, hidden, step.logit_rows);
}

// DeepSeek-V3 (arXiv 2412.19437), section 2.2: the module's input joins the embedding of the next
// token and the main model's hidden state.
Result<Model::Output> Model::forward_mtp(int layer, const Step& step, const float* hidden,
                                         const int32_t* next_ids) {
  CHECK(options_.mtp && static_cast<size_t>(layer) < weights_->mtp.size());
  const MtpWeights& w = weights_->mtp[static_cast<size_t>(layer)];
  const Shared s = share(step);
  const int64_t h = config_.hidden_size;
  float* embedded = alloc<float>(s.tokens * h);
  ops_.embed({next_ids, s.tokens, w.embed, embedded}, context_);
  const float* e = norm(w.enorm, embedded, h, s.tokens);
  const float* m = norm(w.hnorm, hidden, h, s.tokens);
  float* joined = alloc<float>(s.tokens * 2 * h);
  for (int64_t t = 0; t < s.tokens; ++t) {
    std::copy_n(e + t * h, h, joined + t * 2 * h);
    std::copy_n(m + t * h, h, joined + t * 2 * h + h);
  }
  float* residual = linear(w.eh_proj, joined, s.tokens);
  const int index = config_.num_hidden_layers + layer;
  float* delta = alloc<float>(s.tokens * h);
  RETURN_IF_ERROR(decoder_layer(w.layer, index, s, residual, delta));
  const float* out = add_norm(w.head_norm, delta, residual, s.tokens);
  return head(w.head, out, step.logit_rows);
}

Model::Output Model::head(const quant::Matrix& lm_head, const float* hidden,
                          const std::vector<int32_t>& rows) {
  const int64_t h = config_.hidden_size;
  const auto count = static_cast<int64_t>(rows.size());
  float* x = alloc<float>(count * h);
  for (int64_t i = 0; i < count; ++i) {
    std::copy_n(hidden + int64_t{rows[static_cast<size_t>(i)]} * h, h, x + i * h);
  }
  float* logits = linear({.w = lm_head}, x, count);
  laps_.lap(StepTimes::kHead);
  return {logits, hidden};
}

quant::Rows Model::rows_for(const quant::Matrix& w, const float* x, int64_t x_stride,
                            int64_t tokens) {
  quant::Rows rows{.format = quant::act_format(w),
                   .count = tokens,
                   .k = w.k,
                   .static_scale = w.input_scale,
                   .ue8m0 = w.ue8m0_activations};
  if (rows.format == quant::ActFormat::kF32 && rows.row_bytes() == x_stride * 4) {
    rows.data = reinterpret_cast<std::byte*>(const_cast<float*>(x));  // read only from here on
    return rows;
  }
  rows.data = context_.scratch.alloc_bytes(static_cast<size_t>(tokens * rows.row_bytes()));
  if (rows.format == quant::ActFormat::kF32) {
    for (int64_t t = 0; t < tokens; ++t) std::copy_n(x + t * x_stride, w.k, rows.f32(t));
  } else {
    ops_.quantise({x, x_stride, rows}, context_);
  }
  return rows;
}

float* Model::linear(const LinearWeights& w, const quant::Rows& x) {
  float* y = alloc<float>(x.count * w.w.n);
  if (x.count > 0) ops_.linear({x, w.w, w.bias, y, w.w.n}, context_);
  return y;
}

float* Model::linear(const LinearWeights& w, const float* x, int64_t tokens) {
  return linear(w, rows_for(w.w, x, w.w.k, tokens));
}

float* Model::norm(const ops::NormWeight& w, const float* x, int64_t x_stride, int64_t tokens) {
  float* y = alloc<float>(tokens * w.n);
  ops_.rms_norm({.x = x, .tokens = tokens, .x_stride = x_stride, .norm = w, .out = y}, context_);
  return y;
}

float* Model::add_norm(const ops::NormWeight& w, const float* delta, float* residual,
                       int64_t tokens) {
  float* y = alloc<float>(tokens * w.n);
  ops_.add_rms_norm({.x = delta, .residual = residual, .tokens = tokens, .norm = w, .out = y},
                    context_);
  return y;
}

ops::LatentCache Model::cache(int layer) {
  const int64_t width = config_.latent_width();
  const int64_t floats = int64_t{options_.pages} * options_.page_size * width;
  return {reinterpret_cast<float*>(latents_.data()) + layer * floats, options_.page_size, width};
}

void Model::fill_cache() {
  auto* floats = reinterpret_cast<float*>(latents_.data());
  for (size_t i = 0; i < latents_.size() / sizeof(float); ++i) {
    floats[i] = static_cast<float>(i * 2654435761u % 255) / 255.0f - 0.5f;
  }
}

void Model::record_amax(bool on) {
  record_amax_ = on;
  const std::vector<std::array<float, 2>> none(static_cast<size_t>(config_.n_routed_experts));
  amax_.assign(static_cast<size_t>(config_.num_hidden_layers + config_.num_nextn_predict_layers),
               none);
}

void Model::note_amax(int layer, const ExpertRows& lists, const quant::Rows& x,
                      const quant::Rows& h) {
  CHECK(lists.ranks == 1 && h.format == quant::ActFormat::kF32);
  const auto largest = [](const float* v, int64_t n, float& into) {
    for (int64_t i = 0; i < n; ++i) into = std::max(into, std::fabs(v[i]));
  };
  for (int e = 0; e < lists.local_experts; ++e) {
    auto& amax = amax_[static_cast<size_t>(layer)][static_cast<size_t>(e)];
    for (int32_t i = lists.offsets[e]; i < lists.offsets[e + 1]; ++i) {
      largest(x.f32(lists.row_index[i]), x.k, amax[0]);
      largest(h.f32(i), h.k, amax[1]);
    }
  }
}

}  // namespace sortie::model
