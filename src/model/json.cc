#include "model/json.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace sortie::model {

bool json_too_deep(std::string_view text) {
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        in_string = false;
      }
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > kMaxJsonDepth) return true;
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return false;
}

Result<nlohmann::json> parse_json(std::string_view text, const std::string& what) {
  if (json_too_deep(text)) {
    return Status::invalid(
        fmt::format("{} nests JSON deeper than {} levels.", what, kMaxJsonDepth));
  }
  nlohmann::json j = nlohmann::json::parse(text.begin(), text.end(), nullptr, false);
  if (j.is_discarded()) return Status::invalid(fmt::format("{} is not valid JSON.", what));
  return j;
}

Result<std::string> read_text_file(const std::string& path, int64_t max_bytes) {
  // O_NONBLOCK: a folder may hold a FIFO under this name, and opening one must not wait.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    return Status::invalid(fmt::format("Cannot open {}: {}.", path, std::strerror(errno)));
  }
  std::string text;
  Status status;
  struct stat info {};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    status = Status::invalid(fmt::format("{} is not a regular file.", path));
  } else if (info.st_size > max_bytes) {
    status = Status::invalid(fmt::format("{} has {} bytes; at most {} are read.", path,
                                         static_cast<int64_t>(info.st_size), max_bytes));
  } else {
    text.resize(static_cast<size_t>(info.st_size));
    size_t done = 0;
    while (done < text.size()) {
      const ssize_t n = ::read(fd, text.data() + done, text.size() - done);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) {
        status = Status::invalid(fmt::format("Cannot read {}: {}.", path, std::strerror(errno)));
      }
      if (n <= 0) break;
      done += static_cast<size_t>(n);
    }
    text.resize(done);
  }
  ::close(fd);
  if (!status.is_ok()) return status;
  return text;
}

}  // namespace sortie::model
