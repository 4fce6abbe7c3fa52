#pragma once

#include <sys/types.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "exchange/control.h"

namespace sortie::exchange {

// What a started rank is told on its command line.
struct ChildArgs {
  int rank = 0;
  int size = 0;
  int control_fd = -1;
};

// Takes the hidden option that ProcessGroup::start puts behind argv[0] out of the command line, so
// that the parser behind sees what the user typed. To be called first thing in main.
std::optional<ChildArgs> take_child_args(int& argc, char** argv);

// The processes of an expert-parallel group on this host. The process that the user started is rank
// 0; it starts the others by executing itself with the same arguments. Their control sockets are
// inherited socket pairs: there is no address that a stranger could connect to.
//
// No orphan: a child is killed by the kernel when its parent ends (PR_SET_PDEATHSIG), however that
// happens. Children ignore SIGINT and SIGTERM, which a terminal or a service manager sends to all
// of them: rank 0 decides and tells them over control().
class ProcessGroup {
 public:
  // Starts ranks 1..size-1 and waits until all have joined. To be called on the main thread (the
  // kernel ties the children's life to the thread that made them) and best before others exist.
  static Result<std::unique_ptr<ProcessGroup>> start(int argc, char** argv, int size,
                                                     Duration dist_timeout);
  static Result<std::unique_ptr<ProcessGroup>> join(const ChildArgs& args, Duration dist_timeout);

  // Lets go of the control sockets, then close() with a grace of two seconds. Transports over this
  // group are to be gone by then.
  ~ProcessGroup();
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  int rank() const { return control_->rank(); }
  int size() const { return control_->size(); }
  Control& control() { return *control_; }
  const std::shared_ptr<Control>& shared_control() { return control_; }
  // Process id of a child; 0 at the children.
  pid_t pid(int rank) const;

  // At rank 0: waits until the children have ended, and kills those that are left after `grace`.
  // The error names the first that did not end with exit code 0. Elsewhere: nothing.
  Status close(Duration grace);

 private:
  struct Child {
    pid_t pid = 0;
    bool reaped = false;
    int wait_status = 0;
  };

  ProcessGroup() = default;
  Status spawn(int argc, char** argv, int rank, int size, UniqueFd& ours);
  bool reap(int rank, bool block);
  std::string how_ended(int rank);
  void report_death(int rank);

  std::mutex mutex_;  // of children_
  std::vector<Child> children_;
  std::shared_ptr<Control> control_;
};

}  // namespace sortie::exchange
