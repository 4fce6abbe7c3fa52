#include "base/json.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <optional>

namespace sortie {
namespace {

constexpr int kMaxKeys = 4096;

// Looks at the brackets before any parser does, so that neither a parser's recursion nor its tree
// depends on what the text says. Returns what is wrong, if anything.
std::optional<std::string> refuse_shape(std::string_view text, bool count_keys) {
  std::array<int, kMaxJsonDepth + 1> keys{};
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
      if (++depth > kMaxJsonDepth) return fmt::format("nests deeper than {} levels", kMaxJsonDepth);
      keys[static_cast<size_t>(depth)] = 0;
    } else if (c == ']' || c == '}') {
      if (depth > 0) --depth;
    } else if (c == ':' && count_keys && ++keys[static_cast<size_t>(depth)] > kMaxKeys) {
      return fmt::format("has an object of more than {} keys", kMaxKeys);
    }
  }
  return std::nullopt;
}

template <typename Json>
Result<Json> parse_as(std::string_view text, const std::string& what, bool count_keys) {
  if (const auto wrong = refuse_shape(text, count_keys)) {
    return Status::invalid(fmt::format("{} {}, which is refused.", what, *wrong));
  }
  Json json = Json::parse(text.begin(), text.end(), nullptr, false);
  if (json.is_discarded()) return Status::invalid(fmt::format("{} is not valid JSON.", what));
  return json;
}

// `size` is what the system says beforehand: 0 for the files of /proc.
Result<std::string> read_all(int fd, const std::string& path, int64_t size, int64_t max_bytes) {
  if (size > max_bytes) {
    return Status::invalid(
        fmt::format("{} has {} bytes; at most {} are read.", path, size, max_bytes));
  }
  std::string text(static_cast<size_t>(size + 1), '\0');
  size_t done = 0;
  for (;;) {
    const ssize_t n = ::read(fd, text.data() + done, text.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      return Status::invalid(fmt::format("Cannot read {}: {}.", path, std::strerror(errno)));
    }
    done += static_cast<size_t>(n);
    if (done > static_cast<size_t>(max_bytes)) {
      return Status::invalid(fmt::format("{} has more than {} bytes.", path, max_bytes));
    }
    if (n == 0) break;
    if (done == text.size()) {
      text.resize(std::min(2 * done + 4096, static_cast<size_t>(max_bytes) + 1));
    }
  }
  text.resize(done);
  return text;
}

}  // namespace

bool json_too_deep(std::string_view text) { return refuse_shape(text, false).has_value(); }

Result<nlohmann::json> parse_json(std::string_view text, const std::string& what) {
  return parse_as<nlohmann::json>(text, what, false);
}

Result<nlohmann::ordered_json> parse_ordered_json(std::string_view text, const std::string& what) {
  return parse_as<nlohmann::ordered_json>(text, what, true);
}

std::string dump_json(const nlohmann::ordered_json& value) {
  return value.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

Result<std::string> read_text_file(const std::string& path, int64_t max_bytes) {
  // O_NONBLOCK: a folder may hold a FIFO under this name, and opening one must not wait.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    return Status::invalid(fmt::format("Cannot open {}: {}.", path, std::strerror(errno)));
  }
  struct stat info {};
  Result<std::string> text = ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode)
                                 ? read_all(fd, path, info.st_size, max_bytes)
                                 : Status::invalid(fmt::format("{} is not a regular file.", path));
  ::close(fd);
  return text;
}

bool file_exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

}  // namespace sortie
