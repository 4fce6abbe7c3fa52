#include "base/memory.h"

#include <sys/resource.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <limits>
#include <optional>
#include <string_view>

namespace sortie {

namespace {

std::optional<int64_t> number(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t");
  if (begin == std::string_view::npos) return std::nullopt;
  text.remove_prefix(begin);
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end == text.data()) return std::nullopt;
  return value;
}

// The number behind `key` at the start of a line.
std::optional<int64_t> field(const std::string& path, std::string_view key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(key)) return number(std::string_view(line).substr(key.size()));
  }
  return std::nullopt;
}

std::optional<int64_t> first_number(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  return std::getline(file, line) ? number(line) : std::nullopt;  // "max" is none
}

// The names that the two versions of cgroups give the same things.
struct Version {
  const char* limit;
  const char* usage;
  const char* cache;  // in memory.stat; holds shared memory too, which does not yield
  const char* shared;
};
constexpr Version kV1 = {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache ",
                         "total_shmem "};
constexpr Version kV2 = {"memory.max", "memory.current", "file ", "shmem "};
constexpr int64_t kNoLimit = int64_t{1} << 60;  // v1 writes a huge number

// Goes from the process's group up to the root: every group on the way limits.
void consider_groups(const std::string& mount, std::string group, const Version& v,
                     FreeMemory& least) {
  while (true) {
    const std::string folder = mount + (group == "/" ? "" : group);
    const auto limit = first_number(folder + "/" + v.limit);
    const auto usage = first_number(folder + "/" + v.usage);
    if (limit && usage && *limit < kNoLimit) {
      const std::string stat = folder + "/memory.stat";
      const int64_t yields = field(stat, v.cache).value_or(0) - field(stat, v.shared).value_or(0);
      const int64_t left = *limit - *usage + std::max<int64_t>(0, yields);
      if (left < least.bytes) least = {std::max<int64_t>(0, left), "cgroup " + group};
    }
    if (group.empty() || group == "/") return;
    group.resize(group.rfind('/'));
    if (group.empty()) group = "/";
  }
}

void consider_cgroups(const std::string& root, FreeMemory& least) {
  const std::string mount = root + "/sys/fs/cgroup";
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // id:controllers:path
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos || line.compare(second + 1, 1, "/") != 0) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string group = line.substr(second + 1);
    if (controllers.empty()) {
      consider_groups(mount, group, kV2, least);
      consider_groups(mount + "/unified", group, kV2, least);
    } else if (("," + controllers + ",").find(",memory,") != std::string::npos) {
      consider_groups(mount + "/memory", group, kV1, least);
    }
  }
}

}  // namespace

FreeMemory free_memory(const std::string& root) {
  FreeMemory least{std::numeric_limits<int64_t>::max(), "no limit"};
  if (const auto kib = field(root + "/proc/meminfo", "MemAvailable:")) {
    least = {*kib * 1024, "MemAvailable"};
  }
  consider_cgroups(root, least);
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    const int64_t used = field(root + "/proc/self/status", "VmSize:").value_or(0) * 1024;
    const auto left = std::max<int64_t>(0, static_cast<int64_t>(limit.rlim_cur) - used);
    if (left < least.bytes) least = {left, "RLIMIT_AS"};
  }
  return least;
}

int64_t free_shared_memory() {
  struct statvfs fs {};
  if (statvfs("/dev/shm", &fs) != 0) return 0;
  return static_cast<int64_t>(fs.f_bavail) * static_cast<int64_t>(fs.f_frsize);
}

int64_t resident_bytes() { return field("/proc/self/status", "VmRSS:").value_or(0) * 1024; }
int64_t peak_resident_bytes() { return field("/proc/self/status", "VmHWM:").value_or(0) * 1024; }

}  // namespace sortie
