#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/folder_test_util.h"

namespace sortie::cli {

// How a `sortie` process ended.
struct Finished {
  int code = -1;  // exit code, or 128 + signal; -1 if it had to be killed at the deadline
  std::string out;
  std::string err;
};

// A running `sortie` with its output in temporary files.
class SortieProcess {
 public:
  // `enter` is called in the new process before it becomes `sortie`; false ends it.
  explicit SortieProcess(const std::vector<std::string>& arguments,
                         const std::vector<std::string>& environment = {},
                         const std::function<bool()>& enter = nullptr);
  ~SortieProcess();
  SortieProcess(const SortieProcess&) = delete;
  SortieProcess& operator=(const SortieProcess&) = delete;

  pid_t pid() const { return pid_; }
  std::vector<pid_t> children() const;
  // Waits until stdout holds at least so many bytes.
  bool wait_for_output(size_t bytes, Duration most) const;
  Finished finish(Duration most);

 private:
  TemporaryFolder folder_;
  pid_t pid_ = -1;
};

Finished run_sortie(const std::vector<std::string>& arguments,
                    const std::vector<std::string>& environment = {}, double seconds_most = 120);

// What tests of whole models go through: "reference", then the CPU backend's sets by name. One that
// this processor lacks is to be skipped, not left out.
std::vector<std::string> all_devices();

}  // namespace sortie::cli
