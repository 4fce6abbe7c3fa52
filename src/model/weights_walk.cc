#include "model/weights_walk.h"

#include <fmt/format.h>

#include "base/check.h"

namespace sortie::model {
namespace {

// HF's DeepSeek builds q_a and kv_a norms with the class's default eps, whatever rms_norm_eps says.
constexpr float kLoraNormEps = 1e-6f;

class Walk {
 public:
  Walk(const Config& config, WeightVisitor& visitor) : c_(config), visitor_(visitor) {}

  void norm(const std::string& module, int64_t n, float eps, ops::NormWeight& out) {
    out.n = n;
    out.eps = eps;
    visitor_.vector(module + ".weight", n, VectorKind::kNorm, out.weight);
    if (visitor_.has(module + ".bias")) {
      visitor_.vector(module + ".bias", n, VectorKind::kBias, out.bias);
    }
  }
  void norm(const std::string& module, int64_t n, ops::NormWeight& out) {
    norm(module, n, static_cast<float>(c_.rms_norm_eps), out);
  }

  void linear(const std::string& module, int64_t n, int64_t k, int layer, LinearWeights& out,
              bool bias = false) {
    visitor_.linear({module, n, k, LinearKind::kDense, layer}, bias, out);
  }

  void mlp(const std::string& prefix, int64_t width, int layer, MlpWeights& out) {
    linear(prefix + "gate_proj", width, c_.hidden_size, layer, out.gate);
    linear(prefix + "up_proj", width, c_.hidden_size, layer, out.up);
    linear(prefix + "down_proj", c_.hidden_size, width, layer, out.down);
  }

  void attention(const std::string& prefix, int layer, LayerWeights& out) {
    const int64_t heads = c_.num_attention_heads;
    const int64_t hidden = c_.hidden_size;
    const bool bias = c_.attention_bias;
    if (c_.q_lora_rank > 0) {
      linear(prefix + "q_a_proj", c_.q_lora_rank, hidden, layer, out.q_a, bias);
      norm(prefix + "q_a_layernorm", c_.q_lora_rank, kLoraNormEps, out.q_a_norm);
      linear(prefix + "q_b_proj", heads * c_.qk_head_dim(), c_.q_lora_rank, layer, out.q_b);
    } else {
      linear(prefix + "q_proj", heads * c_.qk_head_dim(), hidden, layer, out.q);
    }
    linear(prefix + "kv_a_proj_with_mqa", c_.latent_width(), hidden, layer, out.kv_a, bias);
    norm(prefix + "kv_a_layernorm", c_.kv_lora_rank, kLoraNormEps, out.kv_a_norm);
    visitor_.matrix({prefix + "kv_b_proj", heads * (c_.qk_nope_head_dim + c_.v_head_dim),
                     c_.kv_lora_rank, LinearKind::kKvB, layer},
                    out.kv_b);
    linear(prefix + "o_proj", hidden, heads * c_.v_head_dim, layer, out.o, bias);
  }

  void moe(const std::string& prefix, int layer, MoeWeights& out, ExpertTable& table) {
    const int64_t hidden = c_.hidden_size;
    const int64_t width = c_.moe_intermediate_size;
    visitor_.matrix({prefix + "gate", c_.n_routed_experts, hidden, LinearKind::kPlain, layer},
                    out.router);
    if (c_.topk_method == ops::TopkMethod::kNoauxTc) {
      visitor_.vector(prefix + "gate.e_score_correction_bias", c_.n_routed_experts,
                      VectorKind::kCorrectionBias, out.correction_bias);
    }
    if (c_.n_shared_experts > 0) {
      mlp(prefix + "shared_experts.", width * c_.n_shared_experts, layer, out.shared);
    }
    table.gate_up.resize(static_cast<size_t>(c_.n_routed_experts) * 2);
    table.down.resize(static_cast<size_t>(c_.n_routed_experts));
    for (int e = 0; e < c_.n_routed_experts; ++e) {
      const auto at = static_cast<size_t>(e);
      const std::string expert = fmt::format("{}experts.{}.", prefix, e);
      const auto spec = [&](const char* name, int64_t n, int64_t k) {
        return MatrixSpec{expert + name, n, k, LinearKind::kExpert, layer, e};
      };
      visitor_.matrix(spec("gate_proj", width, hidden), table.gate_up[2 * at]);
      visitor_.matrix(spec("up_proj", width, hidden), table.gate_up[2 * at + 1]);
      visitor_.matrix(spec("down_proj", hidden, width), table.down[at]);
    }
    visitor_.experts_done(prefix + "experts.", layer, table);
  }

  void decoder_layer(int layer, LayerWeights& out, ExpertTable& table) {
    const std::string prefix = fmt::format("model.layers.{}.", layer);
    norm(prefix + "input_layernorm", c_.hidden_size, out.input_norm);
    attention(prefix + "self_attn.", layer, out);
    norm(prefix + "post_attention_layernorm", c_.hidden_size, out.post_attention_norm);
    out.is_moe = c_.is_moe_layer(layer);
    if (out.is_moe) {
      moe(prefix + "mlp.", layer, out.moe, table);
    } else {
      mlp(prefix + "mlp.", c_.intermediate_size, layer, out.mlp);
    }
  }

  void mtp_layer(int layer, MtpWeights& out, ExpertTable& table) {
    const std::string prefix = fmt::format("model.layers.{}.", layer);
    norm(prefix + "enorm", c_.hidden_size, out.enorm);
    norm(prefix + "hnorm", c_.hidden_size, out.hnorm);
    visitor_.linear(
        {prefix + "eh_proj", c_.hidden_size, 2 * c_.hidden_size, LinearKind::kEhProj, layer}, false,
        out.eh_proj);
    norm(prefix + "shared_head.norm", c_.hidden_size, out.head_norm);
    const auto copy = [&](const std::string& module, quant::Matrix& matrix) {
      if (visitor_.has(module + ".weight")) {
        visitor_.matrix({module, c_.vocab_size, c_.hidden_size, LinearKind::kPlain, layer}, matrix);
      }
    };
    copy(prefix + "embed_tokens", out.embed);
    copy(prefix + "shared_head.head", out.head);
    decoder_layer(layer, out.layer, table);
  }

 private:
  const Config& c_;
  WeightVisitor& visitor_;
};

}  // namespace

void walk_weights(const Config& config, int mtp_layers, Weights& out,
                  std::vector<ExpertTable>& tables, WeightVisitor& visitor) {
  const auto layers = static_cast<size_t>(config.num_hidden_layers);
  out.layers.resize(layers);
  out.mtp.resize(static_cast<size_t>(mtp_layers));
  tables.resize(layers + out.mtp.size());
  Walk walk(config, visitor);
  visitor.matrix({"model.embed_tokens", config.vocab_size, config.hidden_size, LinearKind::kPlain},
                 out.embed);
  for (size_t i = 0; i < layers; ++i) {
    walk.decoder_layer(static_cast<int>(i), out.layers[i], tables[i]);
  }
  for (size_t i = 0; i < out.mtp.size(); ++i) {
    walk.mtp_layer(static_cast<int>(layers + i), out.mtp[i], tables[layers + i]);
  }
  walk.norm("model.norm", config.hidden_size, out.final_norm);
  if (!config.tie_word_embeddings) {
    visitor.matrix({"lm_head", config.vocab_size, config.hidden_size, LinearKind::kPlain},
                   out.lm_head);
  }
}

void share_embeddings(const Config& config, Weights& weights) {
  if (config.tie_word_embeddings) weights.lm_head = weights.embed;
  for (MtpWeights& mtp : weights.mtp) {
    if (mtp.embed.codes == nullptr) mtp.embed = weights.embed;
    if (mtp.head.codes == nullptr) mtp.head = weights.lm_head;
  }
}

Weights weights_of_rank(const Weights& all, const std::vector<ExpertTable>& tables, int rank,
                        int ranks) {
  Weights mine = all;
  const auto take = [&](LayerWeights& layer, const ExpertTable& table) {
    if (!layer.is_moe) return;
    const auto experts = static_cast<std::ptrdiff_t>(table.down.size());
    CHECK(experts % ranks == 0);
    const std::ptrdiff_t local = experts / ranks;
    const std::ptrdiff_t first = rank * local;
    const auto gate_up = table.gate_up.begin() + 2 * first;
    layer.moe.gate_up.assign(gate_up, gate_up + 2 * local);
    layer.moe.down.assign(table.down.begin() + first, table.down.begin() + first + local);
  };
  for (size_t i = 0; i < mine.layers.size(); ++i) take(mine.layers[i], tables[i]);
  for (size_t i = 0; i < mine.mtp.size(); ++i) {
    take(mine.mtp[i].layer, tables[mine.layers.size() + i]);
  }
  return mine;
}

}  // namespace sortie::model
