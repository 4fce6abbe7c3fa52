#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "base/tensor.h"
#include "model/safetensors.h"

namespace sortie::model {

// Asks a checkpoint for tensors and collects everything that is wrong, so that a user sees all of
// it in one error.
class TensorTable {
 public:
  explicit TensorTable(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  // The tensor if it is there with one of `dtypes` and one of `shapes`, else null and a remark.
  const Tensor* take(const std::string& name, std::span<const DType> dtypes,
                     std::span<const std::vector<int64_t>> shapes);
  // Looks without asking for it.
  const Tensor* peek(const std::string& name) const { return checkpoint_.find(name); }
  bool has_prefix(const std::string& prefix) const;
  void mistyped(std::string remark) { mistyped_.push_back(std::move(remark)); }

  // Names all problems, and every tensor that was neither taken nor `may_ignore`d.
  Status finish(bool (*may_ignore)(const void* context, std::string_view name),
                const void* context) const;

 private:
  const Checkpoint& checkpoint_;
  std::set<std::string> taken_;
  std::vector<std::string> missing_;
  std::vector<std::string> misshapen_;
  std::vector<std::string> mistyped_;
};

}  // namespace sortie::model
