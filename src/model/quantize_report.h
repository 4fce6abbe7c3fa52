#pragma once

#include <string>
#include <vector>

#include "model/safetensors.h"
#include "quant/matrix.h"

namespace sortie::model {

// How far quantised matrices lie from what they were made of.
class QuantizeReport {
 public:
  // `codes` and `scales` as the file has them; the values are as a loader gets them.
  void add(const std::string& name, const quant::Matrix& source, quant::Format format,
           const Tensor& codes, const Tensor& scales);

  // {"matrices": [{"name", "format", "relative_squared_error", "max_error"}], "layers": [{"layer",
  // "kind", …}], "all": …}; a layer's routed experts are one kind, its other linears another.
  std::string json() const;
  std::string summary() const;  // one line

 private:
  struct Distortion {
    double squared_error = 0;
    double squares = 0;
    double max_error = 0;
    void add(const Distortion& other);
    double relative() const { return squares > 0 ? squared_error / squares : 0; }
  };
  struct Entry {
    std::string name;
    quant::Format format;
    Distortion distortion;
  };
  Distortion all() const;

  std::vector<Entry> entries_;
};

}  // namespace sortie::model
