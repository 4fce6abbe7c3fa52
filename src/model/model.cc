#include "model/model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include "model/deepseek.h"
#include "quant/matrix_ops.h"

namespace sortie::model {

void Step::clear() {
  ids.clear();
  positions.clear();
  segments.clear();
  logit_rows.clear();
  any_prefill_anywhere = false;
}

namespace {

template <typename T>
constexpr bool kHasDevice = std::is_same_v<T, bf16>;

}  // namespace

template <typename T>
DeepSeek<T>::DeepSeek(Config config, std::shared_ptr<const Weights> weights,
                      const ops::BackendOf<T>& backend, void* stream, ThreadPool& threads,
                      exchange::Exchange& exchange, ModelOptions options)
    : Model(std::move(config), threads, exchange, options),
      weights_(std::move(weights)),
      ops_(backend),
      scratch_(backend.device == nullptr ? nullptr : &backend.device->memory),
      context_{threads, scratch_, stream},
      softmax_scale_(static_cast<float>(config_.softmax_scale())),
      cos_sin_(config_.cos_sin_table(options.context_length)) {
  CHECK((ops_.device != nullptr) == kHasDevice<T>,
        "bf16 activations live on a device, fp32 do not");
  const Memory* memory = ops_.device == nullptr ? nullptr : &ops_.device->memory;
  const size_t layers = weights_->layers.size() + (options_.mtp ? weights_->mtp.size() : 0);
  CHECK(!kHasDevice<T> || options_.cache_format == quant::Format::kBf16,
        "a device's latents are bf16");
  latents_ = AlignedBuffer(layers * static_cast<size_t>(layer_latents()), memory);
  cos_sin_table_ = cos_sin_.data();
  if (ops_.device != nullptr) {
    const size_t bytes = cos_sin_.size() * sizeof(float);
    cos_sin_memory_ = AlignedBuffer(bytes, memory);
    ops_.device->upload(cos_sin_memory_.data(), cos_sin_.data(), bytes, stream);
    cos_sin_table_ = reinterpret_cast<const float*>(cos_sin_memory_.data());
  }
}

template <typename T>
template <typename V>
const V* DeepSeek<T>::place(const V* values, int64_t n) {
  if constexpr (!kHasDevice<T>) return values;
  V* placed = alloc<V>(n);
  ops_.device->upload(placed, values, static_cast<size_t>(n) * sizeof(V), context_.stream);
  return placed;
}

template <typename T>
typename DeepSeek<T>::Shared DeepSeek<T>::share(const Step& step) {
  const auto tokens = static_cast<int64_t>(step.ids.size());
  CHECK(step.positions.size() == step.ids.size());
  page_tables_.clear();
  pages_.clear();
  // A device gets copies of all tables in one piece; the first pass measures them.
  const auto pages_of = [&](const Segment& s) {
    const int32_t last = step.positions[static_cast<size_t>(s.first_row + s.rows - 1)];
    return last / options_.page_size + 1;
  };
  const int32_t* placed = nullptr;
  if constexpr (kHasDevice<T>) {
    for (const Segment& s : step.segments) {
      if (s.rows > 0) pages_.insert(pages_.end(), s.page_table, s.page_table + pages_of(s));
    }
    placed = place(pages_.data(), static_cast<int64_t>(pages_.size()));
  }
  int64_t row = 0;
  for (const Segment& s : step.segments) {
    CHECK(s.first_row == row, "segments cover a step's rows in order");
    row += s.rows;
    page_tables_.insert(page_tables_.end(), static_cast<size_t>(s.rows),
                        kHasDevice<T> ? placed : s.page_table);
    if (kHasDevice<T> && s.rows > 0) placed += pages_of(s);
  }
  CHECK(row == tokens, "segments cover all rows");
  int64_t keys = 0;
  for (const int32_t p : step.positions) keys = std::max<int64_t>(keys, p + 1);
  return {tokens,
          keys,
          place(step.positions.data(), tokens),
          place(page_tables_.data(), tokens),
          &step.segments,
          step.any_prefill_anywhere};
}

template <typename T>
Result<Model::Output> DeepSeek<T>::forward(const Step& step) {
  scratch_.reset();
  laps_.start();
  const Shared s = share(step);
  T* delta = alloc<T>(s.tokens * config_.hidden_size);
  ops_.embed({place(step.ids.data(), s.tokens), s.tokens, weights_->embed, delta}, context_);
  float* residual = alloc<float>(s.tokens * config_.hidden_size);
  for (size_t i = 0; i < weights_->layers.size(); ++i) {
    RETURN_IF_ERROR(decoder_layer(weights_->layers[i], static_cast<int>(i), s, residual, delta));
  }
  const T* hidden = add_norm(weights_->final_norm, delta, residual, s.tokens);
  laps_.lap(StepTimes::kRest);
  ++times_.steps;
  // A file cut under the mapping reads as zeros: say so instead of answering with them.
  if (weights_->checkpoint) RETURN_IF_ERROR(weights_->checkpoint->check());
  return head(weights_->lm_head, hidden, step.logit_rows);
}

// DeepSeek-V3 (arXiv 2412.19437), section 2.2: the module's input joins the embedding of the next
// token and the main model's hidden state.
template <typename T>
Result<Model::Output> DeepSeek<T>::forward_mtp(int layer, const Step& step, const void* hidden,
                                               const int32_t* next_ids) {
  CHECK(options_.mtp && static_cast<size_t>(layer) < weights_->mtp.size());
  const MtpWeights& w = weights_->mtp[static_cast<size_t>(layer)];
  const Shared s = share(step);
  const int64_t h = config_.hidden_size;
  T* embedded = alloc<T>(s.tokens * h);
  ops_.embed({place(next_ids, s.tokens), s.tokens, w.embed, embedded}, context_);
  T* joined = alloc<T>(s.tokens * 2 * h);
  const auto join = [&](const ops::NormWeight& norm, const void* x, T* out) {
    ops_.rms_norm({.x = static_cast<const T*>(x),
                   .tokens = s.tokens,
                   .x_stride = h,
                   .norm = norm,
                   .out = out,
                   .out_stride = 2 * h},
                  context_);
  };
  join(w.enorm, embedded, joined);
  join(w.hnorm, hidden, joined + h);
  T* delta = linear(w.eh_proj, joined, s.tokens);
  float* residual = alloc<float>(s.tokens * h);
  const int index = config_.num_hidden_layers + layer;
  RETURN_IF_ERROR(decoder_layer(w.layer, index, s, residual, delta));
  const T* out = add_norm(w.head_norm, delta, residual, s.tokens);
  return head(w.head, out, step.logit_rows);
}

template <typename T>
Model::Output DeepSeek<T>::head(const quant::Matrix& lm_head, const T* hidden,
                                const std::vector<int32_t>& rows) {
  const int64_t h = config_.hidden_size;
  const auto count = static_cast<int64_t>(rows.size());
  T* x = alloc<T>(count * h);
  float* logits = alloc<float>(count * lm_head.n);
  if (count > 0) {
    const quant::Matrix all{.format = ops::kPlainFormat<T>,
                            .n = 1 + rows.back(),
                            .k = h,
                            .codes = reinterpret_cast<const std::byte*>(hidden)};
    ops_.embed({place(rows.data(), count), count, all, x}, context_);
    ops_.linear_f32({rows_for(lm_head, x, h, count), lm_head, nullptr, logits, lm_head.n},
                    context_);
  }
  laps_.lap(StepTimes::kHead);
  return {logits, hidden};
}

template <typename T>
Status DeepSeek<T>::sample(const ops::Sample& args) {
  if constexpr (!kHasDevice<T>) {
    ops_.sample(args, context_);
    return Status::ok();
  } else {
    const Arena::Scope scope(context_.scratch);
    std::vector<ops::SampleRow> params(args.params, args.params + args.rows);
    for (ops::SampleRow& p : params) {
      if (p.repetition_penalty != 1) p.seen = place(p.seen, p.seen_count);
      if (p.presence_penalty != 0 || p.frequency_penalty != 0) {
        p.generated = place(p.generated, p.generated_count);
      }
    }
    ops::Sample on_device = args;
    on_device.params = place(params.data(), args.rows);
    on_device.ids = alloc<int32_t>(args.rows);
    if (args.logprobs != nullptr) on_device.logprobs = alloc<float>(args.rows);
    ops_.sample(on_device, context_);
    const auto rows = static_cast<size_t>(args.rows);
    ops_.device->download(args.ids, on_device.ids, rows * sizeof(int32_t), context_.stream);
    if (args.logprobs != nullptr) {
      ops_.device->download(args.logprobs, on_device.logprobs, rows * sizeof(float),
                            context_.stream);
    }
    return ops_.device->finish(context_.stream);
  }
}

template <typename T>
Result<const float*> DeepSeek<T>::on_host(const float* values, int64_t n) {
  if constexpr (!kHasDevice<T>) return values;
  host_values_.resize(static_cast<size_t>(n));
  ops_.device->download(host_values_.data(), values, host_values_.size() * sizeof(float),
                        context_.stream);
  RETURN_IF_ERROR(ops_.device->finish(context_.stream));
  return host_values_.data();
}

template <typename T>
quant::Rows DeepSeek<T>::new_rows(const quant::Matrix& w, int64_t count) {
  quant::Rows rows = ops::rows_like<T>(w, count);
  rows.data = context_.scratch.alloc_bytes(static_cast<size_t>(count * rows.row_bytes()));
  return rows;
}

template <typename T>
quant::Rows DeepSeek<T>::rows_for(const quant::Matrix& w, const T* x, int64_t x_stride,
                                  int64_t tokens) {
  const quant::ActFormat format = ops::act_format<T>(w);
  quant::Rows rows{.format = format, .count = tokens, .k = w.k};
  if (rows.plain() && rows.row_bytes() == x_stride * static_cast<int64_t>(sizeof(T))) {
    rows.data = reinterpret_cast<std::byte*>(const_cast<T*>(x));  // read only from here on
    return rows;
  }
  rows = new_rows(w, tokens);
  ops_.quantise({x, x_stride, rows}, context_);
  return rows;
}

template <typename T>
void DeepSeek<T>::linear(const LinearWeights& w, const quant::Rows& x, T* y) {
  if (x.count > 0) ops_.linear({x, w.w, w.bias, y, w.w.n}, context_);
}

template <typename T>
T* DeepSeek<T>::linear(const LinearWeights& w, const quant::Rows& x) {
  T* y = alloc<T>(x.count * w.w.n);
  linear(w, x, y);
  return y;
}

template <typename T>
T* DeepSeek<T>::linear(const LinearWeights& w, const T* x, int64_t tokens) {
  return linear(w, rows_for(w.w, x, w.w.k, tokens));
}

template <typename T>
T* DeepSeek<T>::norm(const ops::NormWeight& w, const T* x, int64_t x_stride, int64_t tokens) {
  T* y = alloc<T>(tokens * w.n);
  ops_.rms_norm({.x = x, .tokens = tokens, .x_stride = x_stride, .norm = w, .out = y}, context_);
  return y;
}

template <typename T>
T* DeepSeek<T>::add_norm(const ops::NormWeight& w, const T* delta, float* residual, int64_t tokens,
                         bool starts) {
  T* y = alloc<T>(tokens * w.n);
  ops_.add_rms_norm(
      {.x = delta, .residual = residual, .tokens = tokens, .norm = w, .out = y, .starts = starts},
      context_);
  return y;
}

template <typename T>
int64_t DeepSeek<T>::layer_latents() const {
  return quant::code_bytes(options_.cache_format, int64_t{options_.pages} * options_.page_size,
                           config_.latent_width());
}

template <typename T>
ops::LatentCache DeepSeek<T>::cache(int layer) {
  return {.base = latents_.data() + layer * layer_latents(),
          .page_size = options_.page_size,
          .width = config_.latent_width(),
          .format = options_.cache_format};
}

template <typename T>
void DeepSeek<T>::fill_cache() {
  const auto value = [](size_t i) {
    return static_cast<float>(i * 2654435761u % 255) / 255.0f - 0.5f;
  };
  // The values repeat after 255, so one block of a multiple of that many tiles the cache.
  std::vector<float> values(size_t{255} << 12);
  for (size_t i = 0; i < values.size(); ++i) values[i] = value(i);
  const auto n = static_cast<int64_t>(values.size());
  std::vector<std::byte> block(static_cast<size_t>(quant::code_bytes(options_.cache_format, 1, n)));
  quant::store_plain_row(options_.cache_format, values.data(), n, block.data());
  for (size_t at = 0; at < latents_.size(); at += block.size()) {
    const size_t bytes = std::min(block.size(), latents_.size() - at);
    if constexpr (kHasDevice<T>) {
      ops_.device->upload(latents_.data() + at, block.data(), bytes, context_.stream);
    } else {
      std::memcpy(latents_.data() + at, block.data(), bytes);
    }
  }
}

template <typename T>
void DeepSeek<T>::record_amax(bool on) {
  CHECK(!kHasDevice<T> || !on, "calibration reads activations on the host");
  record_amax_ = on;
  const std::vector<std::array<float, 2>> none(static_cast<size_t>(config_.n_routed_experts));
  amax_.assign(static_cast<size_t>(config_.num_hidden_layers + config_.num_nextn_predict_layers),
               none);
}

template <typename T>
void DeepSeek<T>::note_amax(int layer, const ExpertRows& lists, const quant::Rows& x,
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

// deepseek.cc uses these; the rest of the class follows from make_model.
template class DeepSeek<float>;
template class DeepSeek<bf16>;

std::unique_ptr<Model> make_model(Config config, std::shared_ptr<const Weights> weights,
                                  const ops::Backend& backend, ThreadPool& threads,
                                  exchange::Exchange& exchange, ModelOptions options) {
  return std::make_unique<DeepSeek<float>>(std::move(config), std::move(weights), backend, nullptr,
                                           threads, exchange, options);
}

std::unique_ptr<Model> make_model(Config config, std::shared_ptr<const Weights> weights,
                                  const ops::BackendOf<bf16>& backend, void* stream,
                                  ThreadPool& threads, exchange::Exchange& exchange,
                                  ModelOptions options) {
  return std::make_unique<DeepSeek<bf16>>(std::move(config), std::move(weights), backend, stream,
                                          threads, exchange, options);
}

}  // namespace sortie::model
