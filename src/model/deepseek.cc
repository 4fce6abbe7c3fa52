// The layers of DeepSeek-V2 and V3 with the papers' letters (arXiv 2405.04434, 2412.19437): MLA,
// and the mixture of experts spread over expert-parallel ranks.
#include "model/deepseek.h"

namespace sortie::model {

template <typename T>
void DeepSeek<T>::attention(const LayerWeights& w, int layer, const Shared& s, const T* x, T* out) {
  const int64_t d_nope = config_.qk_nope_head_dim;
  const int64_t d_rope = config_.qk_rope_head_dim;
  const int heads = config_.num_attention_heads;

  const bool has_q_lora = config_.q_lora_rank > 0;
  const quant::Rows h = rows_for(has_q_lora ? w.q_a.w : w.q.w, x, config_.hidden_size, s.tokens);
  T* q = nullptr;  // [tokens, heads, d_nope + d_rope]
  if (has_q_lora) {
    const T* c_q = norm(w.q_a_norm, linear(w.q_a, h), config_.q_lora_rank, s.tokens);
    q = linear(w.q_b, c_q, s.tokens);
  } else {
    q = linear(w.q, h);
  }
  const bool same_form = ops::fits<T>(h, w.kv_a.w);
  const T* kv = same_form ? linear(w.kv_a, h) : linear(w.kv_a, x, s.tokens);  // c_kv | k_rope

  ops_.rope({.x = q,
             .tokens = s.tokens,
             .heads = heads,
             .head_stride = d_nope + d_rope,
             .offset = d_nope,
             .dim = d_rope,
             .positions = s.positions,
             .cos_sin = cos_sin_table_},
            context_);
  ops_.kv_append({.kv = kv,
                  .tokens = s.tokens,
                  .kv_stride = config_.latent_width(),
                  .norm = w.kv_a_norm,
                  .rope_dim = d_rope,
                  .positions = s.positions,
                  .cos_sin = cos_sin_table_,
                  .page_tables = s.page_tables,
                  .cache = cache(layer)},
                 context_);

  const int64_t o_width = heads * config_.v_head_dim;
  T* o = alloc<T>(s.tokens * o_width);
  const auto attend = [&](bool prefill, int64_t begin, int64_t end) {
    const ops::MlaOf<T> args{.q = q + begin * heads * (d_nope + d_rope),
                             .tokens = end - begin,
                             .heads = heads,
                             .nope = d_nope,
                             .rope_dim = d_rope,
                             .v_dim = config_.v_head_dim,
                             .lora = config_.kv_lora_rank,
                             .w_kv_b = w.kv_b,
                             .scale = softmax_scale_,
                             .segment = options_.decode_segment,
                             .keys = s.keys,
                             .positions = s.positions + begin,
                             .page_tables = s.page_tables + begin,
                             .cache = cache(layer),
                             .out = o + begin * o_width};
    (prefill ? ops_.mla_prefill : ops_.mla_decode)(args, context_);
  };
  // Each prompt chunk by itself; decode rows that stand together in one call.
  for (size_t i = 0; i < s.segments->size();) {
    const Segment& first = (*s.segments)[i];
    int64_t end = first.first_row + first.rows;
    ++i;
    while (!first.prefill && i < s.segments->size() && !(*s.segments)[i].prefill) {
      end += (*s.segments)[i++].rows;
    }
    if (end > first.first_row) attend(first.prefill, first.first_row, end);
  }
  linear(w.o, rows_for(w.o.w, o, o_width, s.tokens), out);
}

template <typename T>
void DeepSeek<T>::mlp(const MlpWeights& w, const T* x, int64_t tokens, T* out) {
  const int64_t n = w.gate.w.n;
  const quant::Rows rows = rows_for(w.gate.w, x, w.gate.w.k, tokens);
  float* gate_up = alloc<float>(tokens * 2 * n);
  if (tokens > 0) {
    const quant::Rows up_rows =
        ops::fits<T>(rows, w.up.w) ? rows : rows_for(w.up.w, x, w.up.w.k, tokens);
    ops_.linear_f32({rows, w.gate.w, w.gate.bias, gate_up, 2 * n}, context_);
    ops_.linear_f32({up_rows, w.up.w, w.up.bias, gate_up + n, 2 * n}, context_);
  }
  const quant::Rows h = new_rows(w.down.w, tokens);
  ops_.swiglu_quantise({gate_up, tokens, n, h}, context_);
  linear(w.down, h, out);
}

template <typename T>
Status DeepSeek<T>::moe(const MoeWeights& w, int layer, const Shared& s, const T* x, T* out) {
  const int64_t hidden = config_.hidden_size;
  const int topk = config_.num_experts_per_tok;
  auto* ids = alloc<int32_t>(s.tokens * topk);
  auto* weights = alloc<float>(s.tokens * topk);
  ops_.route({.x = x,
              .tokens = s.tokens,
              .gate = w.router,
              .bias = w.correction_bias,
              .scoring = config_.scoring_func,
              .method = config_.topk_method,
              .groups = config_.n_group,
              .topk_groups = config_.topk_group,
              .topk = topk,
              .normalise = config_.norm_topk_prob,
              .scaling = static_cast<float>(config_.routed_scaling_factor),
              .ids = ids,
              .weights = weights},
             context_);
  laps_.lap(StepTimes::kRoute, layer);
  T* shared = nullptr;
  if (w.shared.gate.w.n > 0) mlp(w.shared, x, s.tokens, shared = alloc<T>(s.tokens * hidden));
  laps_.lap(StepTimes::kDense, layer);

  // Quantised once, here, with the scale that GEMM 1 uses.
  quant::Rows rows = rows_for(w.gate_up[0], x, hidden, s.tokens);
  ASSIGN_OR_RETURN(const ExpertRows lists,
                   exchange_.dispatch({.layer = layer,
                                       .any_prefill = s.any_prefill_anywhere,
                                       .rows = rows.data,
                                       .row_bytes = rows.row_bytes(),
                                       .tokens = s.tokens,
                                       .ids = ids,
                                       .weights = weights}));
  laps_.lap(StepTimes::kDispatch, layer);

  rows.data = const_cast<std::byte*>(lists.rows);  // read only from here on
  rows.count = lists.row_count();
  const int64_t inner = config_.moe_intermediate_size;
  const quant::Rows h = new_rows(w.down[0], lists.entries);
  const bool fused = ops_.grouped_swiglu != nullptr &&
                     ops_.grouped_swiglu({rows, lists.row_index, lists.offsets, lists.local_experts,
                                          w.gate_up.data(), h},
                                         context_);
  if (fused) {
    laps_.lap(StepTimes::kGemm1, layer);
  } else {
    float* gate_up = alloc<float>(lists.entries * 2 * inner);
    ops_.grouped_gemm_f32(
        {rows, lists.row_index, lists.offsets, lists.local_experts, w.gate_up.data(), 2, gate_up},
        context_);
    laps_.lap(StepTimes::kGemm1, layer);
    ops_.swiglu_quantise({gate_up, h.count, inner, h, lists.offsets + lists.local_experts},
                         context_);
  }
  laps_.lap(StepTimes::kSwiglu, layer);
  T* y = alloc<T>(lists.entries * hidden);
  ops_.grouped_gemm({h, nullptr, lists.offsets, lists.local_experts, w.down.data(), 1, y},
                    context_);
  laps_.lap(StepTimes::kGemm2, layer);
  if (record_amax_) note_amax(layer, lists, rows, h);
  T* parts = exchange_.parts_buffer<T>();
  ops_.moe_reduce({lists, y, hidden, parts}, context_);
  laps_.lap(StepTimes::kReduce, layer);

  ASSIGN_OR_RETURN(const CombinedParts combined, exchange_.combine(layer, parts));
  ops_.moe_combine({combined, shared, s.tokens, hidden, out}, context_);
  laps_.lap(StepTimes::kCombine, layer);
  return Status::ok();
}

template <typename T>
Status DeepSeek<T>::decoder_layer(const LayerWeights& w, int layer, const Shared& s,
                                  float* residual, T* delta) {
  const Arena::Scope scope(context_.scratch);
  const bool starts = layer == 0 || layer >= config_.num_hidden_layers;
  const T* x = add_norm(w.input_norm, delta, residual, s.tokens, starts);
  laps_.lap(StepTimes::kRest, layer);
  attention(w, layer, s, x, delta);
  laps_.lap(StepTimes::kAttention, layer);
  x = add_norm(w.post_attention_norm, delta, residual, s.tokens);
  laps_.lap(StepTimes::kRest, layer);
  if (w.is_moe) return moe(w.moe, layer, s, x, delta);
  mlp(w.mlp, x, s.tokens, delta);
  laps_.lap(StepTimes::kDense, layer);
  return Status::ok();
}

template Status DeepSeek<float>::decoder_layer(const LayerWeights&, int, const Shared&, float*,
                                               float*);
template Status DeepSeek<bf16>::decoder_layer(const LayerWeights&, int, const Shared&, float*,
                                              bf16*);

}  // namespace sortie::model
