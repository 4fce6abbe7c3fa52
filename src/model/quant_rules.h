#pragma once

#include <cstdint>

#include "model/weights.h"
#include "quant/matrix.h"

namespace sortie::model {

// What a weight matrix is to the quantisers.
enum class LinearKind : uint8_t {
  kExpert,  // gate, up and down of routed experts
  kDense,   // attention, dense MLPs, shared experts
  kEhProj,  // an MTP layer's eh_proj: keeps its form, as in the official fp8 checkpoints
  kKvB,     // kv_b_proj: absorbed: used as code * scale, never packed
  kPlain,   // router, embeddings, heads: never quantised
};

// How the weights of a dialect are quantised.
constexpr Quantization quantization_of(Dialect d) {
  switch (d) {
    case Dialect::kBf16:
      return Quantization::kNone;
    case Dialect::kFp8Block:
      return Quantization::kFp8Block;
    case Dialect::kW4Afp8:
      return Quantization::kW4Afp8;
    case Dialect::kCompressedTensorsInt8:
    case Dialect::kModelSlim:
      return Quantization::kW8A8Int8;
  }
  return Quantization::kNone;
}

// The form that a bf16 matrix takes under --quantization, while loading as in `sortie quantize`:
// one rule for both, so that writing a file and loading it gives what quantising on the fly gives.
constexpr quant::Format quantised_format(Quantization q, bool dense_fp8_block, LinearKind kind) {
  using quant::Format;
  if (kind == LinearKind::kPlain || kind == LinearKind::kEhProj) return Format::kBf16;
  switch (q) {
    case Quantization::kNone:
      return Format::kBf16;
    case Quantization::kFp8Block:
      return Format::kFp8Block;
    case Quantization::kW4Afp8:
      if (kind == LinearKind::kExpert) return Format::kW4Afp8;
      return dense_fp8_block ? Format::kFp8Block : Format::kBf16;
    case Quantization::kW8A8Int8:
      return kind == LinearKind::kKvB ? Format::kBf16 : Format::kW8A8Int8;
  }
  return Format::kBf16;
}

}  // namespace sortie::model
