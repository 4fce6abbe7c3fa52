#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "model/safetensors.h"

namespace sortie::model {

void SafetensorsWriter::declare(const std::string& name, DType dtype, std::vector<int64_t> shape) {
  CHECK(fd_ < 0 && dtype != DType::kOther, name);
  int64_t bytes = dtype_bytes(dtype);
  for (const int64_t d : shape) CHECK(!__builtin_mul_overflow(bytes, d, &bytes), name);
  declared_.push_back({name, dtype, std::move(shape), bytes});
}

Status SafetensorsWriter::open(const std::string& path) {
  CHECK(fd_ < 0);
  // By hand, an entry at a time: a published model has some 100,000 tensors, and an ordered JSON
  // object finds a key by walking.
  std::string text = R"({"__metadata__":{"format":"pt"})";
  int64_t at = 0;
  for (const Declared& d : declared_) {
    text += fmt::format(R"(,{}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
                        nlohmann::json(d.name).dump(), dtype_name(d.dtype), fmt::join(d.shape, ","),
                        at, at + d.bytes);
    at += d.bytes;
  }
  text += '}';
  text.append((8 - text.size() % 8) % 8, ' ');

  path_ = path;
  temporary_ = path + ".partial";
  fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644);
  if (fd_ < 0) return failed("create");
  const uint64_t size = text.size();
  RETURN_IF_ERROR(write_all(&size, sizeof size));
  return write_all(text.data(), static_cast<int64_t>(text.size()));
}

Status SafetensorsWriter::failed(const char* what) {
  const int error = errno;
  std::string message = fmt::format("Cannot {} {}: {}.", what, temporary_, std::strerror(error));
  return error == ENOSPC || error == EDQUOT || error == EFBIG
             ? Status::exhausted(std::move(message))
             : Status::invalid(std::move(message));
}

Status SafetensorsWriter::write_all(const void* data, int64_t bytes) {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::write(fd_, from, static_cast<size_t>(std::min(bytes, int64_t{1} << 30)));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return failed("write");
    from += n;
    bytes -= n;
  }
  return Status::ok();
}

Status SafetensorsWriter::write(const void* data, int64_t bytes) {
  CHECK(fd_ >= 0 && next_ < declared_.size());
  CHECK(bytes == declared_[next_].bytes, declared_[next_].name);
  RETURN_IF_ERROR(write_all(data, bytes));
  ++next_;
  return Status::ok();
}

Status SafetensorsWriter::finish() {
  CHECK(fd_ >= 0 && next_ == declared_.size());
  if (::fsync(fd_) != 0) return failed("write");
  const int fd = fd_;
  fd_ = -1;
  const bool closed = ::close(fd) == 0;
  if (closed && std::rename(temporary_.c_str(), path_.c_str()) == 0) {
    temporary_.clear();
    return Status::ok();
  }
  Status status = failed(closed ? "rename" : "write");
  ::unlink(temporary_.c_str());
  temporary_.clear();
  return status;
}

SafetensorsWriter::~SafetensorsWriter() {
  if (fd_ >= 0) ::close(fd_);
  if (fd_ >= 0 && !temporary_.empty()) ::unlink(temporary_.c_str());
}

}  // namespace sortie::model
