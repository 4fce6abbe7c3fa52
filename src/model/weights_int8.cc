// int8 linears as compressed-tensors and msModelSlim store them (docs/formats.md has the names).
// Dynamic ones are codes and row scales. A static one computes, by msModelSlim's rule,
//   y = (sum of q_x * q_w + quant_bias) * deq_scale
//   q_x = clamp(rne(x / input_scale + input_offset), -128, 127)
// where quant_bias takes the offset's share off again (and holds the linear's own bias) and
// deq_scale = input_scale * weight_scale. Without an offset the rule is compressed-tensors' static
// one. So deq_scale takes the place of the row scales.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "base/scalar.h"
#include "model/tensor_values.h"
#include "model/weights_loader.h"
#include "quant/matrix_ops.h"

namespace sortie::model {

using quant::Format;
using quant::Matrix;

namespace {

using Shapes = std::vector<std::vector<int64_t>>;

constexpr DType kInt8[] = {DType::kI8};
constexpr DType kInt32[] = {DType::kI32};
constexpr DType kDeqScales[] = {DType::kF32, DType::kI64};
constexpr DType kOffsets[] = {DType::kBf16, DType::kF32, DType::kF16, DType::kI8};

const Shapes& scalar_shapes() {
  static const Shapes shapes = {{1}, {}};
  return shapes;
}

// fp16 models hold each fp32 scale in the low half of an int64, as the NPU's operator wants it.
Result<float> deq_scale_at(const Tensor& t, int64_t i) {
  const bool packed = t.dtype == DType::kI64;
  const uint64_t bits = packed ? load_unaligned<uint64_t>(t.data + i * 8) : 0;
  const float scale = packed ? std::bit_cast<float>(static_cast<uint32_t>(bits)) : value_at(t, i);
  if ((bits >> 32) != 0 || !std::isfinite(scale) || scale < 0) {
    return Status::invalid(fmt::format("deq_scale: element {} is no scale", i));
  }
  return scale;
}

Result<float> input_scale_of(const Tensor& t) {
  const float s = value_at(t, 0);
  if (s > 0 && std::isfinite(s)) return s;
  return Status::invalid(fmt::format("input_scale: is {}; a positive number is needed", s));
}

}  // namespace

WeightsLoader::Int8Tensors WeightsLoader::find_int8(const MatrixSpec& spec, bool fixed) {
  Int8Tensors t;
  const std::string& m = spec.module;
  const bool slim = options_.dialect == Dialect::kModelSlim;
  const Shapes rows = {{spec.n, 1}, {spec.n}};
  t.fixed = fixed;
  t.weight = table_.take(m + ".weight", kInt8, Shapes{{spec.n, spec.k}});
  if (fixed && slim) {
    t.deq_scale = table_.take(m + ".deq_scale", kDeqScales, Shapes{{spec.n}, {spec.n, 1}});
    t.quant_bias = table_.take(m + ".quant_bias", kInt32, Shapes{{spec.n}});
    t.input_offset = table_.take(m + ".input_offset", kOffsets, scalar_shapes());
    // Written beside them by some versions; deq_scale holds what it says.
    if (has(m + ".weight_scale")) table_.take(m + ".weight_scale", kReadFloats, rows);
  } else {
    Shapes shapes = rows;  // strategy "tensor": one scale for all rows
    if (!slim) shapes.insert(shapes.end(), scalar_shapes().begin(), scalar_shapes().end());
    t.weight_scale = table_.take(m + ".weight_scale", kReadFloats, shapes);
  }
  if (fixed) t.input_scale = table_.take(m + ".input_scale", kReadFloats, scalar_shapes());
  if (slim && has(m + ".weight_offset")) {
    t.weight_offset = table_.take(m + ".weight_offset", kOffsets, rows);
  }
  return t;
}

bool WeightsLoader::Int8Tensors::complete() const {
  if (weight == nullptr || (fixed && input_scale == nullptr)) return false;
  return weight_scale != nullptr ||
         (deq_scale != nullptr && quant_bias != nullptr && input_offset != nullptr);
}

// What the file says of the activations, and that its weights are symmetric.
Status WeightsLoader::read_int8_inputs(const Int8Tensors& t, Matrix& out) {
  for (int64_t i = 0; t.weight_offset != nullptr && i < t.weight_offset->elements(); ++i) {
    if (value_at(*t.weight_offset, i) == 0) continue;
    return Status::invalid("weight_offset: is not zero; asymmetric weights are not supported");
  }
  if (!t.fixed) return Status::ok();
  ASSIGN_OR_RETURN(out.input_scale, input_scale_of(*t.input_scale));
  if (t.input_offset == nullptr) return Status::ok();
  const float offset = value_at(*t.input_offset, 0);
  if (!(offset >= -128 && offset <= 127) || offset != std::nearbyint(offset)) {
    return Status::invalid(
        fmt::format("input_offset: is {}; a whole number in -128..127 is needed", offset));
  }
  out.input_offset = static_cast<int>(offset);
  return Status::ok();
}

// The weights' own scales, or for static activations what the integer sums are multiplied with.
Status WeightsLoader::read_int8_scales(const Int8Tensors& t, bool own, const Matrix& m,
                                       float* scales) {
  for (int64_t i = 0; i < m.n; ++i) {
    if (t.weight_scale != nullptr) {
      const float scale = value_at(*t.weight_scale, t.weight_scale->elements() == 1 ? 0 : i);
      scales[i] = own || !t.fixed ? scale : m.input_scale * scale;
    } else {
      ASSIGN_OR_RETURN(const float scale, deq_scale_at(*t.deq_scale, i));
      scales[i] = own ? scale / m.input_scale : scale;
    }
  }
  return Status::ok();
}

// quant_bias, if a sum with it cannot leave int32.
Status WeightsLoader::read_sum_bias(const Tensor& t, Matrix& out) {
  const int64_t room = std::numeric_limits<int32_t>::max() - out.k * 128 * 128;
  AlignedBuffer bias(static_cast<size_t>(out.n) * 4);
  auto* to = reinterpret_cast<int32_t*>(bias.data());
  for (int64_t i = 0; i < out.n; ++i) {
    to[i] = load_unaligned<int32_t>(t.data + i * 4);
    if (std::abs(int64_t{to[i]}) <= room) continue;
    return Status::invalid(
        fmt::format("quant_bias: element {} is {}, which a sum has no room for", i, to[i]));
  }
  out.sum_bias = reinterpret_cast<const int32_t*>(memory_.keep(std::move(bias)));
  return Status::ok();
}

Status WeightsLoader::read_int8_tensors(const MatrixSpec& spec, const Int8Tensors& t, Matrix& out) {
  RETURN_IF_ERROR(read_int8_inputs(t, out));
  // The absorbed kv_b_proj meets no quantised activations. Experts get a scale of their layer's.
  const bool absorbed = spec.kind == LinearKind::kKvB;
  const bool own = absorbed || spec.kind == LinearKind::kExpert;
  AlignedBuffer scales(static_cast<size_t>(out.n) * 4);
  RETURN_IF_ERROR(read_int8_scales(t, own, out, reinterpret_cast<float*>(scales.data())));
  out.scales = memory_.keep(std::move(scales));
  if (absorbed) {
    out.input_scale = 0;
    out.input_offset = 0;
  } else if (t.quant_bias != nullptr) {
    RETURN_IF_ERROR(read_sum_bias(*t.quant_bias, out));
  }
  out.codes = t.weight->data;
  if (!absorbed && pack(out, out)) {
    checkpoint_.drop_pages(*t.weight);
  } else {
    touch(*t.weight);
  }
  return Status::ok();
}

void WeightsLoader::read_int8(const MatrixSpec& spec, const Int8Tensors& t, Matrix& out) {
  out.format = Format::kW8A8Int8;
  if (!t.complete() || !is_wanted(spec)) return;
  count(spec, spec.kind == LinearKind::kKvB || !packs(out), out);
  jobs_.push_back({t.weight->data, t.weight->bytes(), [=, this, &out] {
                     Status s = read_int8_tensors(spec, t, out);
                     if (s.is_ok() || s.code() != StatusCode::kInvalid) return s;
                     return Status::invalid(fmt::format("{}.{}.", spec.module, s.message()));
                   }});
}

// A row goes to several experts in one form, so a layer's experts take the largest of their static
// scales, whatever the rank, and their row scales follow it.
void WeightsLoader::share_static_scale(const std::string& prefix, ExpertTable& table) {
  struct Gemm {
    std::vector<const Tensor*> scales;
    std::vector<Matrix*> matrices;
  };
  Gemm gemms[2];
  const auto add = [&](Gemm& gemm, size_t e, const char* name, Matrix& m) {
    gemm.scales.push_back(table_.peek(fmt::format("{}{}.{}.input_scale", prefix, e, name)));
    gemm.matrices.push_back(&m);
  };
  for (size_t e = 0; e < table.down.size(); ++e) {
    add(gemms[0], e, "gate_proj", table.gate_up[2 * e]);
    add(gemms[0], e, "up_proj", table.gate_up[2 * e + 1]);
    add(gemms[1], e, "down_proj", table.down[e]);
  }
  for (Gemm& gemm : gemms) {
    if (std::find(gemm.scales.begin(), gemm.scales.end(), nullptr) != gemm.scales.end()) continue;
    after_.emplace_back([this, gemm = std::move(gemm), prefix]() -> Status {
      float largest = 0;
      for (const Tensor* t : gemm.scales) {
        const Result<float> s = input_scale_of(*t);
        if (!s.is_ok()) {
          return Status::invalid(fmt::format("{}*.{}.", prefix, s.status().message()));
        }
        largest = std::max(largest, *s);
        checkpoint_.drop_pages(*t);  // its page may hold weights of another rank
      }
      for (Matrix* m : gemm.matrices) {
        m->input_scale = largest;
        if (m->codes == nullptr) continue;  // another rank's
        AlignedBuffer scales(static_cast<size_t>(m->n) * 4);
        auto* to = reinterpret_cast<float*>(scales.data());
        for (int64_t i = 0; i < m->n; ++i) to[i] = largest * m->f32_scales()[i];
        m->scales = memory_.keep(std::move(scales));
      }
      return Status::ok();
    });
  }
}

}  // namespace sortie::model
