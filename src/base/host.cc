#include "base/host.h"

#include "base/json.h"

namespace sortie {

namespace {

std::string line_of(const std::string& path) {
  const auto text = read_text_file(path, 4096);
  return text.is_ok() ? text->substr(0, text->find('\n')) : "";
}

}  // namespace

std::string boot_id() { return line_of("/proc/sys/kernel/random/boot_id"); }

std::string host_name() { return line_of("/proc/sys/kernel/hostname"); }

}  // namespace sortie
