#pragma once

#include <map>
#include <string>
#include <string_view>

#include "base/status.h"

// Where the ranks of a group run, and who starts them (docs/exchange.md, "Hosts").
namespace sortie::exchange {

// What the command line says. SGLang's names.
struct LaunchFlags {
  int ep_size = 0;             // --ep-size: ranks of the group, on all nodes; 0 = not given
  std::string dist_init_addr;  // --dist-init-addr HOST:PORT, where rank 0 listens; "" = not given
  int nnodes = 0;              // --nnodes; 0 = not given
  int node_rank = -1;          // --node-rank; -1 = not given
};

using Environment = std::map<std::string, std::string, std::less<>>;
Environment process_environment();

struct LaunchPlan {
  std::string launcher;  // "torchrun", "mpirun" or "Slurm", each process one rank; "" = this
                         // command starts the ranks of its node
  int size = 1;          // ranks of the group
  int rank = 0;          // of this process
  int here = 1;          // ranks that this process starts, itself included: rank .. rank + here - 1
  int nodes = 1;         // 1 = all on this host; a launcher that does not say counts as 2
  // Where rank 0 listens for the ranks that it did not start itself; no host if it starts all.
  std::string host;
  int port = 0;
  std::string job;  // the same for all processes of one launch, "" if the launcher gives no name

  bool meets() const { return !host.empty(); }
  bool one_host() const { return nodes == 1; }
};

// A pure function of the flags and the environment. Precedence: torchrun's variables, mpirun's,
// Slurm's, the flags; a launcher that started one process alone is no launcher. Errors are usage
// errors: flags and environment that contradict each other, numbers that make no sense, an address
// that nobody gives.
Result<LaunchPlan> plan_launch(const LaunchFlags& flags, const Environment& environment);

// The first host of Slurm's compressed list: "gpu[03-07,9],login1" gives gpu03. "" if malformed.
std::string first_host(std::string_view list);

}  // namespace sortie::exchange
