#include "model/upload.h"

#include <fmt/format.h>

#include <new>
#include <vector>

#include "quant/matrix_ops.h"

namespace sortie::model {
namespace {

class Uploader {
 public:
  Uploader(const ops::Device& device, void* stream, const Config& config)
      : device_(device), stream_(stream), config_(config) {}

  std::shared_ptr<std::deque<AlignedBuffer>> owned() { return owned_; }

  void matrix(quant::Matrix& m) {
    if (m.n == 0) return;
    const quant::Matrix host = m;
    std::byte* codes = take(code_bytes(m));
    std::byte* scales = take(scale_bytes(m));
    copy(host, codes, scales);
    place(m, codes, scales);
  }

  // Matrices of one op stand at equal distances, so that kernels need no table of them.
  void matrices(std::vector<quant::Matrix>& all) {
    if (all.empty()) return;
    if (device_.packed_bytes(all[0]) > 0) return pack(all);
    const int64_t code_stride = round_up(code_bytes(all[0]));
    const int64_t scale_stride = round_up(scale_bytes(all[0]));
    const auto count = static_cast<int64_t>(all.size());
    std::byte* codes = take(code_stride * count);
    std::byte* scales = take(scale_stride * count);
    for (int64_t i = 0; i < count; ++i) {
      quant::Matrix& m = all[static_cast<size_t>(i)];
      const quant::Matrix host = m;
      std::byte* own_scales = scales == nullptr ? nullptr : scales + i * scale_stride;
      copy(host, codes + i * code_stride, own_scales);
      place(m, codes + i * code_stride, own_scales);
    }
  }

  void floats(const float*& v, int64_t n) {
    if (v == nullptr) return;
    std::byte* to = take(n * 4);
    send(to, v, n * 4);
    v = reinterpret_cast<const float*>(to);
  }
  void norm(ops::NormWeight& w) { floats(w.weight, w.n); }
  void linear(LinearWeights& w) {
    matrix(w.w);
    floats(w.bias, w.w.n);
  }
  void mlp(MlpWeights& w) {
    linear(w.gate);
    linear(w.up);
    linear(w.down);
  }

  // Absorbed attention multiplies with W_UK's transpose: per head [lora, nope], then W_UV [v,
  // lora].
  void kv_b(quant::Matrix& m) {
    const int64_t nope = config_.qk_nope_head_dim;
    const int64_t per_head = nope + config_.v_head_dim;
    const int64_t lora = m.k;
    std::vector<bf16> arranged(static_cast<size_t>(m.n * lora));
    std::vector<float> row(static_cast<size_t>(lora));
    for (int64_t n = 0; n < m.n; ++n) {
      quant::dequantise_row(m, n, row.data());
      bf16* head = arranged.data() + n / per_head * per_head * lora;
      const int64_t d = n % per_head;
      for (int64_t l = 0; l < lora; ++l) {
        const bf16 v = to_bf16(row[static_cast<size_t>(l)]);
        (d < nope ? head[l * nope + d] : head[d * lora + l]) = v;
      }
    }
    const int64_t bytes = m.n * lora * 2;
    std::byte* to = take(bytes);
    send(to, arranged.data(), bytes);
    m = {.format = quant::Format::kBf16, .n = m.n, .k = lora, .codes = to};
  }

  void layer(LayerWeights& w) {
    norm(w.input_norm);
    norm(w.post_attention_norm);
    linear(w.q);
    linear(w.q_a);
    linear(w.q_b);
    norm(w.q_a_norm);
    linear(w.kv_a);
    norm(w.kv_a_norm);
    kv_b(w.kv_b);
    linear(w.o);
    if (!w.is_moe) return mlp(w.mlp);
    matrix(w.moe.router);
    floats(w.moe.correction_bias, w.moe.router.n);
    matrices(w.moe.gate_up);
    matrices(w.moe.down);
    mlp(w.moe.shared);
  }

 private:
  // The device arranges what it was sent in rows.
  void pack(std::vector<quant::Matrix>& all) {
    const int64_t codes = round_up(code_bytes(all[0]));
    const int64_t bytes = round_up(device_.packed_bytes(all[0]));
    std::byte* to = take(bytes * static_cast<int64_t>(all.size()));
    const AlignedBuffer rows(static_cast<size_t>(codes + scale_bytes(all[0])), &device_.memory);
    for (quant::Matrix& m : all) {
      quant::Matrix in_rows = m;
      copy(m, rows.data(), rows.data() + codes);
      place(in_rows, rows.data(), rows.data() + codes);
      device_.pack(in_rows, to, stream_);
      place(m, to, nullptr);
      m.layout = quant::Layout::kTiles;
      to += bytes;
    }
  }

  static int64_t round_up(int64_t n) { return quant::ceil_div(n, 256) * 256; }
  static int64_t code_bytes(const quant::Matrix& m) {
    return quant::code_bytes(m.format, m.n, m.k);
  }
  static int64_t scale_bytes(const quant::Matrix& m) {
    return quant::scale_bytes(m.format, m.n, m.k);
  }

  std::byte* take(int64_t bytes) {
    if (bytes == 0) return nullptr;
    return owned_->emplace_back(static_cast<size_t>(bytes), &device_.memory).data();
  }
  void send(void* to, const void* from, int64_t bytes) {
    device_.upload(to, from, static_cast<size_t>(bytes), stream_);
  }
  void copy(const quant::Matrix& host, std::byte* codes, std::byte* scales) {
    send(codes, host.codes, code_bytes(host));
    send(scales, host.scales, scale_bytes(host));
  }
  static void place(quant::Matrix& m, std::byte* codes, std::byte* scales) {
    m.codes = codes;
    m.scales = scales;
  }

  const ops::Device& device_;
  void* stream_;
  const Config& config_;
  std::shared_ptr<std::deque<AlignedBuffer>> owned_ = std::make_shared<std::deque<AlignedBuffer>>();
};

// What only the CPU backends compute (msModelSlim's static activations and smoothed norms).
Status check_device_has(const Weights& w) {
  bool fixed = false;
  bool smoothed = w.final_norm.bias != nullptr;
  const auto see = [&](const LayerWeights& l) {
    for (const LinearWeights* linear :
         {&l.q, &l.q_a, &l.q_b, &l.kv_a, &l.o, &l.mlp.gate, &l.mlp.up, &l.mlp.down,
          &l.moe.shared.gate, &l.moe.shared.up, &l.moe.shared.down}) {
      fixed = fixed || quant::act_format(linear->w) == quant::ActFormat::kInt8Static;
    }
    for (const std::vector<quant::Matrix>* experts : {&l.moe.gate_up, &l.moe.down}) {
      for (const quant::Matrix& m : *experts) {
        fixed = fixed || quant::act_format(m) == quant::ActFormat::kInt8Static;
      }
    }
    for (const ops::NormWeight* norm :
         {&l.input_norm, &l.post_attention_norm, &l.q_a_norm, &l.kv_a_norm}) {
      smoothed = smoothed || norm->bias != nullptr;
    }
  };
  for (const LayerWeights& l : w.layers) see(l);
  for (const MtpWeights& m : w.mtp) {
    see(m.layer);
    for (const ops::NormWeight* norm : {&m.enorm, &m.hnorm, &m.head_norm}) {
      smoothed = smoothed || norm->bias != nullptr;
    }
    fixed = fixed || quant::act_format(m.eh_proj.w) == quant::ActFormat::kInt8Static;
  }
  if (!fixed && !smoothed) return Status::ok();
  return Status::invalid(
      fmt::format("the GPU backend does not run {}; use --device cpu",
                  fixed ? "int8 linears with static activation scales" : "norms with a bias"));
}

}  // namespace

Result<std::shared_ptr<const Weights>> upload(const Weights& host, const Config& config,
                                              const ops::Device& device, void* stream) {
  RETURN_IF_ERROR(check_device_has(host));
  Uploader to(device, stream, config);
  auto weights = std::make_shared<Weights>(host);
  weights->owned = to.owned();
  size_t done = 0;
  try {
    to.matrix(weights->embed);
    weights->lm_head = host.lm_head.codes == host.embed.codes ? weights->embed : host.lm_head;
    if (weights->lm_head.codes != weights->embed.codes) to.matrix(weights->lm_head);
    to.norm(weights->final_norm);
    for (LayerWeights& layer : weights->layers) {
      to.layer(layer);
      ++done;
    }
    for (size_t i = 0; i < host.mtp.size(); ++i) {
      MtpWeights& m = weights->mtp[i];
      to.norm(m.enorm);
      to.norm(m.hnorm);
      to.linear(m.eh_proj);
      to.layer(m.layer);
      to.norm(m.head_norm);
      // The model's own where the file has no copies.
      const auto shared_or_own = [&](quant::Matrix& own, const quant::Matrix& model_host,
                                     const quant::Matrix& model_device) {
        if (own.codes == model_host.codes) {
          own = model_device;
        } else {
          to.matrix(own);
        }
      };
      shared_or_own(m.embed, host.embed, weights->embed);
      shared_or_own(m.head, host.lm_head, weights->lm_head);
    }
  } catch (const std::bad_alloc&) {
    return Status::exhausted(fmt::format(
        "the GPU's memory holds only {} of the model's {} layers; take a quantised form", done,
        host.layers.size()));
  }
  RETURN_IF_ERROR(device.finish(stream));
  if (host.checkpoint) RETURN_IF_ERROR(host.checkpoint->check());
  weights->checkpoint = nullptr;  // nothing is read from the files any more
  return std::shared_ptr<const Weights>(std::move(weights));
}

}  // namespace sortie::model
