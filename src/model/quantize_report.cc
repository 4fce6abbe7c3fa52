#include "model/quantize_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "base/scalar.h"
#include "model/tensor_values.h"
#include "quant/matrix_ops.h"

namespace sortie::model {

using quant::Format;

namespace {

// The layer of "model.layers.N.…", or -1.
int layer_of(const std::string& name) {
  constexpr std::string_view kPrefix = "model.layers.";
  int layer = -1;
  if (name.starts_with(kPrefix)) {
    std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), layer);
  }
  return layer;
}

}  // namespace

void QuantizeReport::Distortion::add(const Distortion& other) {
  squared_error += other.squared_error;
  squares += other.squares;
  max_error = std::max(max_error, other.max_error);
}

void QuantizeReport::add(const std::string& name, const quant::Matrix& source, Format format,
                         const Tensor& codes, const Tensor& scales) {
  std::vector<float> wide(static_cast<size_t>(scales.elements()));
  std::vector<bf16> narrow(wide.size());
  for (size_t i = 0; i < wide.size(); ++i) {
    wide[i] = value_at(scales, static_cast<int64_t>(i));
    narrow[i] = to_bf16(wide[i]);
  }
  const quant::Matrix made{.format = format,
                           .n = source.n,
                           .k = source.k,
                           .codes = codes.data,
                           .scales = format == Format::kW4Afp8
                                         ? static_cast<const void*>(narrow.data())
                                         : static_cast<const void*>(wide.data())};
  Distortion d;
  std::vector<float> before(static_cast<size_t>(source.k));
  std::vector<float> after(before.size());
  for (int64_t row = 0; row < source.n; ++row) {
    quant::dequantise_row(source, row, before.data());
    quant::dequantise_row(made, row, after.data());
    for (size_t i = 0; i < before.size(); ++i) {
      const double error = std::abs(double{before[i]} - after[i]);
      d.squared_error += error * error;
      d.squares += double{before[i]} * before[i];
      d.max_error = std::max(d.max_error, error);
    }
  }
  entries_.push_back({name, format, d});
}

QuantizeReport::Distortion QuantizeReport::all() const {
  Distortion sum;
  for (const Entry& e : entries_) sum.add(e.distortion);
  return sum;
}

std::string QuantizeReport::json() const {
  using Json = nlohmann::ordered_json;
  const auto put = [](Json& to, const Distortion& d) {
    to["relative_squared_error"] = d.relative();
    to["max_error"] = d.max_error;
  };
  Json matrices = Json::array();
  std::map<std::pair<int, std::string>, Distortion> by_layer;
  for (const Entry& e : entries_) {
    Json& m = matrices.emplace_back(Json{{"name", e.name}, {"format", format_name(e.format)}});
    put(m, e.distortion);
    const bool expert = e.name.find(".experts.") != std::string::npos;
    by_layer[{layer_of(e.name), expert ? "experts" : "linears"}].add(e.distortion);
  }
  Json layers = Json::array();
  for (const auto& [key, distortion] : by_layer) {
    put(layers.emplace_back(Json{{"layer", key.first}, {"kind", key.second}}), distortion);
  }
  Json whole = Json::object();
  put(whole, all());
  return Json{{"all", whole}, {"layers", layers}, {"matrices", matrices}}.dump(1) + "\n";
}

std::string QuantizeReport::summary() const {
  const Distortion sum = all();
  return fmt::format("distortion: {} matrices, relative squared error {:.3e}, largest error {:.3g}",
                     entries_.size(), sum.relative(), sum.max_error);
}

}  // namespace sortie::model
