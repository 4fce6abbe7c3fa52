#include "model/weights_loader.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <new>

#include "base/progress.h"
#include "base/threads.h"
#include "model/tensor_values.h"
#include "quant/matrix_ops.h"

namespace sortie::model {

using quant::ceil_div;
using quant::Format;
using quant::kGroup;
using quant::Matrix;

namespace {

constexpr DType kFloats[] = {DType::kBf16, DType::kF32};

bool is_aligned(const Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(dtype_bytes(t.dtype)) == 0;
}

AlignedBuffer copy_of(const Tensor& t) {
  AlignedBuffer buffer(static_cast<size_t>(t.bytes()));
  std::memcpy(buffer.data(), t.data, buffer.size());
  return buffer;
}

AlignedBuffer to_floats(const Tensor& t) {
  AlignedBuffer buffer(static_cast<size_t>(t.elements()) * 4);
  auto* out = reinterpret_cast<float*>(buffer.data());
  for (int64_t i = 0; i < t.elements(); ++i) out[i] = value_at(t, i);
  return buffer;
}

AlignedBuffer to_bf16s(const Tensor& t) {
  AlignedBuffer buffer(static_cast<size_t>(t.elements()) * 2);
  auto* out = reinterpret_cast<bf16*>(buffer.data());
  for (int64_t i = 0; i < t.elements(); ++i) out[i] = to_bf16(value_at(t, i));
  return buffer;
}

}  // namespace

WeightsLoader::Stored WeightsLoader::find_stored(const MatrixSpec& spec) {
  const std::string name = spec.module + ".weight";
  Stored s{.n = spec.n, .k = spec.k};
  const std::vector<int64_t> shape[] = {{spec.n, spec.k}};
  const bool fp8 = options_.dialect == Dialect::kFp8Block || options_.dialect == Dialect::kW4Afp8;
  const bool int4 = options_.dialect == Dialect::kW4Afp8 && spec.kind == LinearKind::kExpert;
  const bool slim = options_.dialect == Dialect::kModelSlim;
  std::vector<DType> types = {DType::kBf16};
  if (slim) types.push_back(DType::kF16);  // of fp16 models, widened
  if (spec.kind == LinearKind::kPlain || slim) {
    types.push_back(DType::kF32);
  } else {
    if (int4) types.insert(types.begin(), DType::kI8);
    if (fp8) types.insert(types.begin(), DType::kE4m3);
  }
  const Tensor* there = table_.peek(name);
  const DType type = there == nullptr ? types.front() : there->dtype;
  const int64_t groups = ceil_div(spec.k, kGroup);
  if (type == DType::kI8 && int4) {
    s.format = Format::kW4Afp8;
    s.weight =
        table_.take(name, types, std::vector<std::vector<int64_t>>{{spec.n, ceil_div(spec.k, 2)}});
    s.scale = table_.take(name + "_scale_inv", kFloats,
                          std::vector<std::vector<int64_t>>{{spec.n, groups}});
  } else if (type == DType::kE4m3 && fp8) {
    constexpr DType kScales[] = {DType::kF32, DType::kE8m0};
    s.format = Format::kFp8Block;
    s.weight = table_.take(name, types, shape);
    s.scale = table_.take(name + "_scale_inv", kScales,
                          std::vector<std::vector<int64_t>>{{ceil_div(spec.n, kGroup), groups}});
  } else {
    s.format = type == DType::kF32 || type == DType::kF16 ? Format::kF32 : Format::kBf16;
    s.weight = table_.take(name, types, shape);
  }
  return s;
}

// Whether a linear is to be read as int8; a file that contradicts its description is remarked on.
bool WeightsLoader::is_int8(const MatrixSpec& spec, bool* fixed) {
  const bool slim = options_.dialect == Dialect::kModelSlim;
  if (spec.kind == LinearKind::kPlain && !slim) return false;
  if (!slim && options_.dialect != Dialect::kCompressedTensorsInt8) return false;
  const std::string name = spec.module + ".weight";
  const Tensor* t = table_.peek(name);
  const bool stored = t != nullptr && t->dtype == DType::kI8;
  if (!slim) {
    *fixed = options_.int8_static_activations;
    if (stored && std::find(options_.ignore.begin(), options_.ignore.end(), spec.module) !=
                      options_.ignore.end()) {
      table_.mistyped(fmt::format("{} is I8, though config.json's \"ignore\" names it", name));
    }
    return stored || t == nullptr;
  }
  const auto it = options_.description->find(spec.module);
  if (it == options_.description->end()) {
    // Without a word about it, only a plain type can be read.
    if (stored) table_.mistyped(fmt::format("{} is I8 without an entry in the description", name));
    return stored;
  }
  const bool said = it->second != SlimScheme::kFloat;
  *fixed = it->second == SlimScheme::kW8A8Static;
  if (t != nullptr && stored != said) {
    table_.mistyped(fmt::format("{} is {}, though the description says {}", name,
                                dtype_name(t->dtype), said ? "W8A8" : "FLOAT"));
  } else if (said && spec.kind == LinearKind::kPlain) {
    table_.mistyped(fmt::format("{} is I8, which a router, embedding or head cannot be", name));
  } else if (*fixed && spec.kind == LinearKind::kExpert) {
    table_.mistyped(fmt::format("{} is W8A8; experts are read as W8A8_DYNAMIC", name));
  }
  return said || stored;
}

void WeightsLoader::linear(const MatrixSpec& spec, bool has_bias, LinearWeights& out) {
  matrix(spec, out.w);
  // A static int8 linear's own bias is inside its quant_bias.
  if (!has_bias || has(spec.module + ".quant_bias")) return;
  vector(spec.module + ".bias", spec.n, VectorKind::kBias, out.bias);
}

bool WeightsLoader::is_wanted(const MatrixSpec& spec) const {
  return spec.kind != LinearKind::kExpert ||
         (spec.expert >= options_.first_expert && spec.expert < options_.last_expert);
}

void WeightsLoader::matrix(const MatrixSpec& spec, Matrix& out) {
  out.n = spec.n;
  out.k = spec.k;
  if (bool fixed = false; is_int8(spec, &fixed)) {
    read_int8(spec, find_int8(spec, fixed), out);
    return;
  }
  const Stored stored = find_stored(spec);
  Format format = stored.format;
  if (format == Format::kBf16) {
    format = quantised_format(options_.quantization, options_.dense_fp8_block, spec.kind);
  }
  const bool pack = spec.kind != LinearKind::kKvB;  // attention reads its rows
  out.format = format;
  out.ue8m0_activations = options_.ue8m0 && out.format == Format::kFp8Block;
  if (!stored.complete() || !is_wanted(spec)) return;
  const bool in_place = !(pack && packs(out)) && format == stored.format &&
                        stored.weight->dtype != DType::kF16 && is_aligned(*stored.weight);
  count(spec, in_place, out);
  const int64_t bytes =
      stored.weight->bytes() + (stored.scale == nullptr ? 0 : stored.scale->bytes());
  jobs_.push_back({stored.weight->data, bytes, [=, this, &out] {
                     if (format != stored.format) {
                       read_quantised(stored, format, pack, out);
                     } else {
                       read_kept(stored, pack, out);
                     }
                     return Status::ok();
                   }});
}

WeightsLoader::Source WeightsLoader::open_source(const Stored& stored) const {
  Source s;
  s.m = Matrix{.format = stored.format, .n = stored.n, .k = stored.k};
  if (stored.weight->dtype == DType::kF16) {
    s.codes = to_floats(*stored.weight);
    s.m.codes = s.codes.data();
  } else if (is_aligned(*stored.weight)) {
    s.m.codes = stored.weight->data;
  } else {
    s.codes = copy_of(*stored.weight);
    s.m.codes = s.codes.data();
  }
  if (stored.scale == nullptr) return s;
  const DType wanted = stored.format == Format::kW4Afp8 ? DType::kBf16 : DType::kF32;
  if (stored.scale->dtype == wanted && is_aligned(*stored.scale)) {
    s.m.scales = stored.scale->data;
  } else {
    s.scales = wanted == DType::kBf16 ? to_bf16s(*stored.scale) : to_floats(*stored.scale);
    s.m.scales = s.scales.data();
  }
  return s;
}

void WeightsLoader::count(const MatrixSpec& spec, bool in_place, const Matrix& m) {
  WeightBytes::Part& part = spec.kind == LinearKind::kExpert ? bytes_.experts : bytes_.rest;
  (in_place ? part.mapped : part.made) += m.bytes();
}

int64_t WeightsLoader::packed_bytes(const Matrix& m) const {
  const ops::Backend* backend = options_.pack_for;
  return backend == nullptr || backend->pack == nullptr ? 0 : backend->packed_bytes(m);
}

// Puts the codes into the backend's layout, if it has one for them. Its tiles hold the scales of
// kW4Afp8 too.
bool WeightsLoader::pack(const Matrix& m, Matrix& out) {
  const int64_t bytes = packed_bytes(m);
  if (bytes == 0) return false;
  std::byte* codes = memory_.allocate(bytes);
  options_.pack_for->pack(m, codes);
  out.codes = codes;
  out.layout = quant::Layout::kTiles;
  return true;
}

void WeightsLoader::read_kept(const Stored& stored, bool may_pack, Matrix& out) {
  Source s = open_source(stored);
  const bool packed = may_pack && pack(s.m, out);
  if (s.codes.size() > 0 || packed) {
    checkpoint_.drop_pages(*stored.weight);
    if (!packed) memory_.keep(std::move(s.codes));
  } else {
    touch(*stored.weight);
  }
  const bool scales_packed = packed && stored.format == Format::kW4Afp8;
  if (s.scales.size() > 0 || scales_packed) {
    checkpoint_.drop_pages(*stored.scale);
    if (!scales_packed) memory_.keep(std::move(s.scales));
  }
  if (!packed) out.codes = s.m.codes;
  out.scales = scales_packed ? nullptr : s.m.scales;
}

void WeightsLoader::read_quantised(const Stored& stored, Format format, bool may_pack,
                                   Matrix& out) {
  const Source s = open_source(stored);
  Matrix m{.format = format, .n = stored.n, .k = stored.k};
  const bool tiled = may_pack && packed_bytes(m) > 0;
  const bool tiled_scales = tiled && format == Format::kW4Afp8;
  std::deque<AlignedBuffer> passing;  // what packing reads and nobody else
  const auto place = [&](bool kept, int64_t bytes) {
    return kept ? memory_.allocate(bytes) : passing.emplace_back(static_cast<size_t>(bytes)).data();
  };
  std::byte* codes = place(!tiled, quant::code_bytes(format, m.n, m.k));
  std::byte* scales = place(!tiled_scales, quant::scale_bytes(format, m.n, m.k));
  quant::quantise_rows(s.m, 0, m.n, format, codes, scales);
  checkpoint_.drop_pages(*stored.weight);
  m.codes = codes;
  m.scales = scales;
  if (tiled) {
    pack(m, out);
  } else {
    out.codes = codes;
  }
  if (!tiled_scales) out.scales = scales;
}

void WeightsLoader::vector(const std::string& name, int64_t n, VectorKind /*kind*/,
                           const float*& out) {
  const Tensor* t = table_.take(name, kReadFloats, std::vector<std::vector<int64_t>>{{n}});
  if (t == nullptr) return;
  jobs_.push_back({t->data, t->bytes(), [this, t, &out] {
                     if (t->dtype == DType::kF32 && is_aligned(*t)) {
                       touch(*t);
                       out = reinterpret_cast<const float*>(t->data);
                     } else {
                       out = reinterpret_cast<const float*>(memory_.keep(to_floats(*t)));
                     }
                     return Status::ok();
                   }});
}

bool WeightsLoader::has(const std::string& name) { return table_.peek(name) != nullptr; }

void WeightsLoader::experts_done(const std::string& prefix, int layer, ExpertTable& table) {
  const Format format = table.down.front().format;
  const auto differs = [&](const Matrix& m) { return m.format != format; };
  // A grouped GEMM runs over matrices of one format.
  if (std::any_of(table.gate_up.begin(), table.gate_up.end(), differs) ||
      std::any_of(table.down.begin(), table.down.end(), differs)) {
    table_.mistyped(fmt::format("{}*: the experts of one layer differ in type", prefix));
    return;
  }
  if (format == Format::kW4Afp8) add_activation_scales(prefix, layer, table);
  if (format == Format::kW8A8Int8 && options_.int8_static_activations) {
    share_static_scale(prefix, table);
  }
}

// The static scales of a layer's two GEMMs: the maximum over all its experts, whatever the rank.
void WeightsLoader::add_activation_scales(const std::string& prefix, int layer,
                                          ExpertTable& table) {
  if (options_.quantization == Quantization::kW4Afp8) {
    if (static_cast<size_t>(layer) >= options_.activation_scales.size()) return;  // dynamic
    const auto& scales = options_.activation_scales[static_cast<size_t>(layer)];
    for (Matrix& m : table.gate_up) m.input_scale = round_to_bf16(scales[0]);
    for (Matrix& m : table.down) m.input_scale = round_to_bf16(scales[1]);
    return;
  }
  std::vector<std::string> names;
  names.reserve(table.down.size() * 3);
  for (size_t e = 0; e < table.down.size(); ++e) {
    for (const char* part : {"w1", "w3", "w2"}) {
      names.push_back(fmt::format("{}{}.{}.input_scale", prefix, e, part));
    }
  }
  if (std::none_of(names.begin(), names.end(),
                   [&](const std::string& n) { return table_.peek(n) != nullptr; })) {
    return;  // dynamic
  }
  const std::vector<int64_t> shapes[] = {{1}, {}};
  std::vector<const Tensor*> scales;
  scales.reserve(names.size());
  for (const std::string& name : names) scales.push_back(table_.take(name, kFloats, shapes));
  if (std::find(scales.begin(), scales.end(), nullptr) != scales.end()) return;
  const std::byte* at = scales.front()->data;
  jobs_.push_back({at, 0, [this, scales = std::move(scales), prefix, &table] {
                     return read_activation_scales(scales, prefix, table);
                   }});
}

Status WeightsLoader::read_activation_scales(const std::vector<const Tensor*>& scales,
                                             const std::string& prefix, ExpertTable& table) {
  float largest[2] = {0, 0};  // GEMM 1 (w1 and w3), GEMM 2 (w2)
  for (size_t i = 0; i < scales.size(); ++i) {
    const float s = round_to_bf16(value_at(*scales[i], 0));
    if (!(s > 0) || !std::isfinite(s)) {
      return Status::invalid(
          fmt::format("{}{} has an input_scale of {}; a positive number is needed.", prefix, i / 3,
                      value_at(*scales[i], 0)));
    }
    float& gemm = largest[i % 3 == 2 ? 1 : 0];
    gemm = std::max(gemm, s);
    // Its page holds weights that another rank may own; they are not this rank's to keep.
    checkpoint_.drop_pages(*scales[i]);
  }
  for (Matrix& m : table.gate_up) m.input_scale = largest[0];
  for (Matrix& m : table.down) m.input_scale = largest[1];
  return Status::ok();
}

Status WeightsLoader::run(const std::string& what, bool quiet) {
  std::stable_sort(jobs_.begin(), jobs_.end(),
                   [](const Job& a, const Job& b) { return std::less<>()(a.at, b.at); });
  int64_t total = 0;
  for (const Job& job : jobs_) total += job.bytes;
  constexpr int kMebi = 20;
  Progress progress(what, total >> kMebi, "MiB", quiet);
  std::atomic<size_t> next{0};
  std::atomic<int64_t> done{0};
  std::mutex status_mutex;
  Status status;
  ThreadPool pool(std::min(available_cpus(), 16));
  pool.run([&](int, int) {
    for (size_t i = next++; i < jobs_.size(); i = next++) {
      Status job_status;
      try {
        job_status = jobs_[i].run();
      } catch (const std::bad_alloc&) {
        job_status = Status::exhausted("There is not enough memory for the weights.");
      }
      if (!job_status.is_ok()) {
        const std::lock_guard lock(status_mutex);
        if (status.is_ok()) status = job_status;
        next = jobs_.size();
      }
      const int64_t before = done.fetch_add(jobs_[i].bytes);
      progress.add(((before + jobs_[i].bytes) >> kMebi) - (before >> kMebi));
    }
  });
  jobs_.clear();
  for (const auto& last : after_) {
    if (status.is_ok()) status = last();
  }
  after_.clear();
  progress.finish();
  return status;
}

}  // namespace sortie::model
