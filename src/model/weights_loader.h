#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/arena.h"
#include "model/quant_description.h"
#include "model/tensor_table.h"
#include "model/weight_memory.h"
#include "model/weights_walk.h"

namespace sortie::model {

// Reads a checkpoint's tensors: the walk only looks at names, shapes and types and notes jobs; if
// all is well the jobs then read, convert and quantise, in parallel and in the files' order.
class WeightsLoader : public WeightVisitor {
 public:
  struct Options {
    Dialect dialect = Dialect::kBf16;
    Quantization quantization = Quantization::kNone;  // of a bf16 checkpoint
    bool dense_fp8_block = false;
    bool ue8m0 = false;
    const ops::Backend* pack_for = nullptr;               // LoadOptions::pack_for
    bool int8_static_activations = false;                 // compressed-tensors
    std::vector<std::string> ignore;                      // compressed-tensors
    std::shared_ptr<const QuantDescription> description;  // msModelSlim
    std::vector<std::array<float, 2>> activation_scales;
    int first_expert = 0;  // of those wanted
    int last_expert = 0;   // one past them
  };
  WeightsLoader(const Checkpoint& checkpoint, TensorTable& table, Options options,
                std::deque<AlignedBuffer>& owned)
      : checkpoint_(checkpoint), table_(table), options_(std::move(options)), memory_(owned) {}

  void matrix(const MatrixSpec& spec, quant::Matrix& out) override;
  void vector(const std::string& name, int64_t n, VectorKind kind, const float*& out) override;
  void linear(const MatrixSpec& spec, bool has_bias, LinearWeights& out) override;
  bool has(const std::string& name) override;
  void experts_done(const std::string& prefix, int layer, ExpertTable& table) override;

  // What will be held, once the walk is done.
  const WeightBytes& bytes() const { return bytes_; }
  // Runs what the walk noted.
  Status run(const std::string& what, bool quiet);

 private:
  struct Job {
    const std::byte* at;  // in the mapping: the order of reading
    int64_t bytes;        // that are read
    std::function<Status()> run;
  };
  struct Stored {  // a matrix as the file has it
    quant::Format format = quant::Format::kBf16;
    int64_t n = 0;
    int64_t k = 0;
    const Tensor* weight = nullptr;
    const Tensor* scale = nullptr;  // quantised formats only
    bool complete() const {
      const bool plain = format == quant::Format::kBf16 || format == quant::Format::kF32;
      return weight != nullptr && (plain || scale != nullptr);
    }
  };
  // The same as a Matrix: in the mapping where that is aligned, else in the buffers.
  struct Source {
    quant::Matrix m;
    AlignedBuffer codes;
    AlignedBuffer scales;
  };

  struct Int8Tensors {   // of one int8 linear; null where the dialect has none
    bool fixed = false;  // static activations
    const Tensor* weight = nullptr;
    const Tensor* weight_scale = nullptr;
    const Tensor* weight_offset = nullptr;
    const Tensor* input_scale = nullptr;
    const Tensor* input_offset = nullptr;
    const Tensor* quant_bias = nullptr;
    const Tensor* deq_scale = nullptr;
    bool complete() const;
  };

  bool is_int8(const MatrixSpec& spec, bool* fixed);
  Int8Tensors find_int8(const MatrixSpec& spec, bool fixed);
  void read_int8(const MatrixSpec& spec, const Int8Tensors& tensors, quant::Matrix& out);
  Status read_int8_tensors(const MatrixSpec& spec, const Int8Tensors& tensors, quant::Matrix& out);
  static Status read_int8_inputs(const Int8Tensors& tensors, quant::Matrix& out);
  static Status read_int8_scales(const Int8Tensors& tensors, bool own, const quant::Matrix& m,
                                 float* scales);
  Status read_sum_bias(const Tensor& tensor, quant::Matrix& out);
  void share_static_scale(const std::string& prefix, ExpertTable& table);
  bool is_wanted(const MatrixSpec& spec) const;
  Stored find_stored(const MatrixSpec& spec);
  void count(const MatrixSpec& spec, bool in_place, const quant::Matrix& m);
  int64_t packed_bytes(const quant::Matrix& m) const;  // 0 = stays in rows
  bool packs(const quant::Matrix& m) const { return packed_bytes(m) > 0; }
  bool pack(const quant::Matrix& m, quant::Matrix& out);
  void read_kept(const Stored& stored, bool may_pack, quant::Matrix& out);
  void read_quantised(const Stored& stored, quant::Format format, bool may_pack,
                      quant::Matrix& out);
  Source open_source(const Stored& stored) const;
  void add_activation_scales(const std::string& prefix, int layer, ExpertTable& table);
  Status read_activation_scales(const std::vector<const Tensor*>& scales, const std::string& prefix,
                                ExpertTable& table);

  const Checkpoint& checkpoint_;
  TensorTable& table_;
  const Options options_;
  WeightMemory memory_;
  std::vector<Job> jobs_;
  WeightBytes bytes_;
  std::vector<std::function<Status()>> after_;  // the jobs, one by one
};

}  // namespace sortie::model
