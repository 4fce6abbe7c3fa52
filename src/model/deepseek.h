#pragma once

#include <memory>
#include <span>
#include <vector>

#include "model/model.h"

namespace sortie::model {

// The model with activations of type T: fp32 on CPUs, bf16 on GPUs. The same layers, written once
// (deepseek.cc); with a device all pointers but a Step's are into its memory.
template <typename T>
class DeepSeek final : public Model {
 public:
  DeepSeek(Config config, std::shared_ptr<const Weights> weights, const ops::BackendOf<T>& backend,
           void* stream, ThreadPool& threads, exchange::Exchange& exchange, ModelOptions options);

  Result<Output> forward(const Step& step) override;
  Result<Output> forward_mtp(int layer, const Step& step, const void* hidden,
                             const int32_t* next_ids) override;
  Status sample(const ops::Sample& args) override;
  Result<const float*> on_host(const float* values, int64_t n) override;
  void record_amax(bool on) override;
  const ExpertAmax& expert_amax() const override { return amax_; }
  void fill_cache() override;

 private:
  // What all layers of a step share.
  struct Shared {
    int64_t tokens;
    int64_t keys;                       // no position is at or past this
    const int32_t* positions;           // [tokens]
    const int32_t* const* page_tables;  // [tokens]
    const std::vector<Segment>* segments;
    bool any_prefill_anywhere;
  };
  Shared share(const Step& step);

  // deepseek.cc: the layers, as the paper has them. x is [tokens, hidden], normed; `out` takes a
  // result of the same shape.
  void attention(const LayerWeights& w, int layer, const Shared& s, const T* x, T* out);
  void mlp(const MlpWeights& w, const T* x, int64_t tokens, T* out);
  Status moe(const MoeWeights& w, int layer, const Shared& s, const T* x, T* out);
  // residual += delta, then the layer up to its last addition, whose term becomes the new delta
  // (both [tokens, hidden]). The first layer of a stack starts the residual from its delta.
  Status decoder_layer(const LayerWeights& w, int layer, const Shared& s, float* residual,
                       T* delta);

  // model.cc: helpers that pick formats and places, so that the layers need not.
  quant::Rows rows_for(const quant::Matrix& w, const T* x, int64_t x_stride, int64_t tokens);
  quant::Rows new_rows(const quant::Matrix& w, int64_t count);
  void linear(const LinearWeights& w, const quant::Rows& x, T* y);
  T* linear(const LinearWeights& w, const quant::Rows& x);
  T* linear(const LinearWeights& w, const T* x, int64_t tokens);
  T* norm(const ops::NormWeight& w, const T* x, int64_t x_stride, int64_t tokens);
  T* add_norm(const ops::NormWeight& w, const T* delta, float* residual, int64_t tokens,
              bool starts = false);
  Output head(const quant::Matrix& lm_head, const T* hidden, const std::vector<int32_t>& rows);
  int64_t layer_latents() const;  // bytes
  ops::LatentCache cache(int layer);
  void note_amax(int layer, const ExpertRows& lists, const quant::Rows& x, const quant::Rows& h);
  template <typename V>
  V* alloc(int64_t n) {
    return context_.scratch.template alloc<V>(n);
  }
  // The host's values where the backend can read them.
  template <typename V>
  const V* place(const V* values, int64_t n);

  const std::shared_ptr<const Weights> weights_;
  const ops::BackendOf<T>& ops_;
  Arena scratch_;
  const ops::Context context_;
  const float softmax_scale_;
  const std::vector<float> cos_sin_;
  AlignedBuffer cos_sin_memory_;             // on a device
  const float* cos_sin_table_ = nullptr;     // where ops read it
  AlignedBuffer latents_;                    // [layers][pages, page_size, width]
  std::vector<const int32_t*> page_tables_;  // of a step, by token
  std::vector<int32_t> pages_;               // … of all its segments, for a device
  std::vector<float> host_values_;           // what on_host gave
  bool record_amax_ = false;
  ExpertAmax amax_;
};

}  // namespace sortie::model
