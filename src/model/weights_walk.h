#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/config.h"
#include "model/quant_rules.h"
#include "model/weights.h"

namespace sortie::model {

// All experts of a layer, not just one rank's: gate_up[2e], gate_up[2e+1], down[e]. Entries that
// nobody asked for have a shape and no codes.
struct ExpertTable {
  std::vector<quant::Matrix> gate_up;
  std::vector<quant::Matrix> down;
};

// A weight matrix as the walk meets it; its tensor is `module`.weight.
struct MatrixSpec {
  std::string module;
  int64_t n = 0;
  int64_t k = 0;
  LinearKind kind = LinearKind::kDense;
  int layer = -1;
  int expert = -1;  // routed experts only
};

enum class VectorKind : uint8_t { kNorm, kBias, kCorrectionBias };

// What is done with each tensor: loading it, inventing it, writing it. The out parameters stay
// where they are for the life of the Weights and tables, so a visitor may fill them later.
class WeightVisitor {
 public:
  virtual ~WeightVisitor() = default;
  virtual void matrix(const MatrixSpec& spec, quant::Matrix& out) = 0;
  // A linear of its own: its matrix and, where the model has one, its bias.
  virtual void linear(const MatrixSpec& spec, bool has_bias, LinearWeights& out) {
    matrix(spec, out.w);
    if (has_bias) vector(spec.module + ".bias", spec.n, VectorKind::kBias, out.bias);
  }
  virtual void vector(const std::string& name, int64_t n, VectorKind kind, const float*& out) = 0;
  // Whether an optional tensor is to be had: an MTP layer's own embedding or head, a norm's bias.
  virtual bool has(const std::string& name) = 0;
  // After the experts of a layer; `prefix` ends in "mlp.experts.".
  virtual void experts_done(const std::string& prefix, int layer, ExpertTable& table) = 0;
};

// Visits every weight of the model and of its first `mtp_layers` MTP layers, under Hugging Face's
// names. Sizes `out` and `tables` (one a layer, MTP layers behind the others) first.
void walk_weights(const Config& config, int mtp_layers, Weights& out,
                  std::vector<ExpertTable>& tables, WeightVisitor& visitor);

// Gives each MTP layer without copies the model's own embedding and head, and a tied model its
// head. To be called once the matrices are filled.
void share_embeddings(const Config& config, Weights& weights);

// The Weights of one rank: `all` with the rank's contiguous share of the tables' experts.
Weights weights_of_rank(const Weights& all, const std::vector<ExpertTable>& tables, int rank,
                        int ranks);

}  // namespace sortie::model
