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
#include "exchange/launch/launch_plan.h"

namespace sortie::exchange {

// What a started rank is told on its command line.
struct ChildArgs {
  int rank = 0;
  int size = 0;
  int control_fd = -1;  // -1: it is on another node than rank 0 and joins over the network
};

// How the ranks that no common process starts find and trust each other.
struct StartOptions {
  Duration dist_timeout = seconds(60);
  std::string cluster_key_file;  // "": this host's own key within a host, none between hosts
  bool insecure = false;         // no key between hosts
  // "name value" lines that must be the same on all ranks: their flags and their model.
  std::vector<std::string> settings;
};

// Takes the hidden option that ProcessGroup::start puts behind argv[0] out of the command line, so
// that the parser behind sees what the user typed. To be called first thing in main.
std::optional<ChildArgs> take_child_args(int& argc, char** argv);

// The processes of an expert-parallel group. A process that the user started is the first rank of
// its node; it starts the node's others by executing itself with the same arguments. The control
// sockets of node 0 are inherited socket pairs: there is no address that a stranger could connect
// to. Ranks of other nodes, and processes that a launcher started, meet rank 0 over TCP
// (launch/rendezvous.h).
//
// No orphan: a child is killed by the kernel when its parent ends (PR_SET_PDEATHSIG), however that
// happens. Children ignore SIGINT and SIGTERM, which a terminal or a service manager sends to all
// of them: rank 0 decides and tells them over control().
class ProcessGroup {
 public:
  // As `plan` says; `child` is what the first rank of this node told this process, if it started
  // it. To be called on the main thread, as start().
  static Result<std::unique_ptr<ProcessGroup>> open(const LaunchPlan& plan,
                                                    const std::optional<ChildArgs>& child, int argc,
                                                    char** argv, const StartOptions& options);
  // One host: starts ranks 1..size-1 and waits until all have joined. To be called on the main
  // thread (the kernel ties the children's life to the thread that made them) and best before
  // others exist.
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
  // This host's address in the network of the ranks that meet; "" if one process started all.
  const std::string& address() const { return address_; }
  // Process id of a child; 0 of ranks that this process did not start.
  pid_t pid(int rank) const;

  // Waits until the children have ended, and kills those that are left after `grace`. The error
  // names the first that did not end with exit code 0.
  // `lost` (bits by rank): those that the group went on without; they are killed at once and are no
  // error.
  Status close(Duration grace, uint64_t lost = 0);

 private:
  struct Child {
    pid_t pid = 0;
    bool reaped = false;
    int wait_status = 0;
  };

  ProcessGroup() = default;
  // Starts one rank; with `ours`, a socket pair's other end is left there.
  Status spawn(int argc, char** argv, int rank, int size, UniqueFd* ours);
  Status meet(const LaunchPlan& plan, int rank, const StartOptions& options,
              std::vector<UniqueFd>& links);
  bool reap(int rank, bool block);
  std::string how_ended(int rank);
  void report_death(int rank);

  std::mutex mutex_;  // of children_
  std::vector<Child> children_;
  std::string address_;
  std::shared_ptr<Control> control_;
};

}  // namespace sortie::exchange
