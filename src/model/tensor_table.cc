#include "model/tensor_table.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "model/safetensors_header.h"

namespace sortie::model {
namespace {

constexpr size_t kNamed = 10;  // of each kind of problem; the rest is counted

std::string shape_text(const Tensor& t) {
  return fmt::format("[{}]", fmt::join(t.shape.begin(), t.shape.begin() + t.rank, ", "));
}

void append(std::string& text, const char* kind, const std::vector<std::string>& remarks) {
  if (remarks.empty()) return;
  const size_t named = std::min(remarks.size(), kNamed);
  text += fmt::format("; {} {}: {}", remarks.size(), kind,
                      fmt::join(remarks.begin(), remarks.begin() + static_cast<int>(named), ", "));
  if (remarks.size() > named) text += ", ...";
}

}  // namespace

const Tensor* TensorTable::take(const std::string& name, std::span<const DType> dtypes,
                                std::span<const std::vector<int64_t>> shapes) {
  taken_.insert(name);
  const Tensor* t = checkpoint_.find(name);
  if (t == nullptr) {
    missing_.push_back(name);
    return nullptr;
  }
  const bool type_fits = std::find(dtypes.begin(), dtypes.end(), t->dtype) != dtypes.end();
  const bool shape_fits =
      std::any_of(shapes.begin(), shapes.end(), [&](const std::vector<int64_t>& s) {
        return std::equal(s.begin(), s.end(), t->shape.begin(), t->shape.begin() + t->rank);
      });
  if (!type_fits) {
    std::vector<std::string_view> names;
    for (const DType d : dtypes) names.push_back(dtype_name(d));
    mistyped_.push_back(fmt::format("{} is {} instead of {}", name, dtype_name(t->dtype),
                                    fmt::join(names, " or ")));
  }
  if (!shape_fits) {
    misshapen_.push_back(fmt::format("{} is {} instead of [{}]", name, shape_text(*t),
                                     fmt::join(shapes.front(), ", ")));
  }
  return type_fits && shape_fits ? t : nullptr;
}

bool TensorTable::has_prefix(const std::string& prefix) const {
  const auto it = checkpoint_.tensors().lower_bound(prefix);
  return it != checkpoint_.tensors().end() && it->first.starts_with(prefix);
}

Status TensorTable::finish(bool (*may_ignore)(const void* context, std::string_view name),
                           const void* context) const {
  std::vector<std::string> extra;
  for (const auto& [name, entry] : checkpoint_.tensors()) {
    if (!taken_.contains(name) && !may_ignore(context, name)) extra.push_back(printable(name));
  }
  std::string text;
  append(text, "missing", missing_);
  append(text, "misshapen", misshapen_);
  append(text, "mistyped", mistyped_);
  append(text, "unexpected", extra);
  if (text.empty()) return Status::ok();
  return Status::invalid(fmt::format("The tensors do not fit config.json: {}.", text.substr(2)));
}

}  // namespace sortie::model
