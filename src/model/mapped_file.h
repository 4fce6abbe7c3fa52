#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"

namespace sortie::model {

// A regular file mapped read-only. If the file shrinks while it is mapped, a read past its new end
// would be a SIGBUS; a process-wide handler maps zeros there instead and remembers it, so that
// check() can say it in a sentence.
class MappedFile {
 public:
  static Result<std::unique_ptr<MappedFile>> open(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  const std::byte* data() const { return data_; }
  int64_t size() const { return size_; }

  // Reads through the file, not the mapping; what lies past the end is an error.
  Status read(int64_t offset, void* to, int64_t bytes) const;
  // Not ok once the file was truncated (or its disk failed) while mapped. Cheap enough for a step.
  Status check() const;
  // The system may forget the pages of [begin, begin + bytes) until they are read again.
  void drop(const std::byte* begin, int64_t bytes) const;

 private:
  MappedFile() = default;
  std::string path_;
  const std::byte* data_ = nullptr;
  int64_t size_ = 0;
  int fd_ = -1;
  int slot_ = -1;  // in the handler's table
};

}  // namespace sortie::model
