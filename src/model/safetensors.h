#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/tensor.h"
#include "model/mapped_file.h"

namespace sortie::model {

// A memory-mapped checkpoint: model.safetensors, or model.safetensors.index.json and its shards.
// Untrusted: headers, offsets and index entries are checked before anything is used; a shard that
// is truncated while mapped gives a Status from check(), not a bare SIGBUS.
class Checkpoint {
 public:
  struct Entry {
    Tensor tensor;
    int shard = 0;
  };

  static Result<std::unique_ptr<Checkpoint>> open(const std::string& folder);
  // One .safetensors file.
  static Result<std::unique_ptr<Checkpoint>> open_file(const std::string& path);

  const Tensor* find(const std::string& name) const;
  const std::map<std::string, Entry>& tensors() const { return tensors_; }
  // Bytes of all tensors.
  int64_t bytes() const { return bytes_; }
  const std::vector<std::string>& shard_paths() const { return paths_; }
  // Tells the system that the pages under this tensor will not be read again (peak memory).
  void drop_pages(const Tensor& tensor) const;
  // Not ok, naming the file, if a shard shrank since it was opened; what was read from it then is
  // zeros. To be asked after reading tensors.
  Status check() const;

 private:
  Checkpoint() = default;
  Status add_shard(const std::string& path);
  Status add_index(const std::string& folder, const std::string& index_path);

  std::vector<std::unique_ptr<MappedFile>> files_;
  std::vector<std::string> paths_;
  std::map<std::string, Entry> tensors_;
  int64_t bytes_ = 0;
};

// Writes one .safetensors file: tensors in the order declared, header padded to 8 bytes, fsync,
// then renamed into place; a failed or interrupted write leaves no file under the final name.
// Larger scalars first keep every tensor aligned, so that it can be used in place when loaded.
class SafetensorsWriter {
 public:
  SafetensorsWriter() = default;
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  // Declares a tensor; all declarations come before open().
  void declare(const std::string& name, DType dtype, std::vector<int64_t> shape);
  Status open(const std::string& path);
  // The bytes of the next declared tensor, whole.
  Status write(const void* data, int64_t bytes);
  // All declared tensors are written: makes the file appear under its name.
  Status finish();

 private:
  struct Declared {
    std::string name;
    DType dtype;
    std::vector<int64_t> shape;
    int64_t bytes;
  };
  Status write_all(const void* data, int64_t bytes);
  Status failed(const char* what);

  std::vector<Declared> declared_;
  size_t next_ = 0;
  int fd_ = -1;
  std::string path_;
  std::string temporary_;
};

}  // namespace sortie::model
