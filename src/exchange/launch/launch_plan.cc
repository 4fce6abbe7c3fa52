#include "exchange/launch/launch_plan.h"

#include <fmt/format.h>
#include <unistd.h>

#include <charconv>
#include <cstdint>
#include <optional>

#include "exchange/exchange.h"

namespace sortie::exchange {
namespace {

// Ports below the range that systems hand out by themselves (Linux: from 32768), away from the
// well-known ones.
constexpr int kFirstPort = 15000;
constexpr int kPorts = 17000;

std::string text_of(const Environment& e, std::string_view name) {
  const auto it = e.find(name);
  return it == e.end() ? std::string() : it->second;
}

// The first of these variables that is set, with its name.
struct Variable {
  std::string name;
  std::string text;
};
std::optional<Variable> first_of(const Environment& e,
                                 std::initializer_list<std::string_view> names) {
  for (const std::string_view name : names) {
    if (std::string text = text_of(e, name); !text.empty()) {
      return Variable{std::string(name), std::move(text)};
    }
  }
  return std::nullopt;
}

std::optional<int> number(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) return std::nullopt;
  return value;
}

Result<int> number_of(const Variable& v) {
  if (const auto value = number(v.text)) return *value;
  return Status::usage(
      fmt::format("{}={} in the environment is not a number; unset it or start "
                  "with the launcher that sets it",
                  v.name, v.text));
}

// What a launcher's variables say, before the flags are heard.
struct Launched {
  std::string launcher;
  int rank = 0;
  int size = 1;
  int nodes = 0;  // 0 = not said
  int node = -1;  // -1 = not said
  std::string host;
  int port = 0;
  std::string job;
};

// A port that two jobs on a host are unlikely to share, the same in all processes of one.
int port_of_job(std::string_view job) {
  uint32_t hash = 2166136261U;  // FNV-1a
  for (const char c : job) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619U;
  return kFirstPort + static_cast<int>(hash % kPorts);
}

// RANK and WORLD_SIZE as torchrun (torch.distributed.run) and those who imitate it set them.
Result<std::optional<Launched>> from_torchrun(const Environment& e) {
  const auto rank = first_of(e, {"RANK"});
  const auto size = first_of(e, {"WORLD_SIZE"});
  if (!rank || !size) return std::optional<Launched>();
  Launched l{.launcher = "torchrun", .host = text_of(e, "MASTER_ADDR")};
  ASSIGN_OR_RETURN(l.rank, number_of(*rank));
  ASSIGN_OR_RETURN(l.size, number_of(*size));
  if (const auto v = first_of(e, {"MASTER_PORT"})) {
    ASSIGN_OR_RETURN(l.port, number_of(*v));
    // torchrun's agent itself listens on MASTER_PORT then; workers are expected to be its clients.
    if (text_of(e, "TORCHELASTIC_USE_AGENT_STORE") == "True") {
      l.port += l.port < 65535 ? 1 : -1;
    }
  }
  if (const auto v = first_of(e, {"GROUP_RANK"})) {
    ASSIGN_OR_RETURN(l.node, number_of(*v));
  }
  if (const auto v = first_of(e, {"GROUP_WORLD_SIZE"})) {
    ASSIGN_OR_RETURN(l.nodes, number_of(*v));
  }
  if (const auto v = first_of(e, {"LOCAL_WORLD_SIZE"})) {
    ASSIGN_OR_RETURN(const int local, number_of(*v));
    if (local == l.size) l.nodes = 1;
  }
  if (const auto v = first_of(e, {"TORCHELASTIC_RUN_ID"})) l.job = "torchrun " + v->text;
  return std::optional<Launched>(std::move(l));
}

// Open MPI's variables, or those of PMI as MPICH, Intel MPI and MVAPICH set them.
Result<std::optional<Launched>> from_mpirun(const Environment& e) {
  const auto rank = first_of(e, {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"});
  const auto size = first_of(e, {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"});
  // srun speaks PMI too, and then its own variables say more; a lone rank says too little.
  if (!rank || !size) return std::optional<Launched>();
  if (rank->name != "OMPI_COMM_WORLD_RANK" && first_of(e, {"SLURM_STEP_NUM_TASKS"}) &&
      !first_of(e, {"MPI_LOCALNRANKS"})) {
    return std::optional<Launched>();
  }
  Launched l{.launcher = "mpirun"};
  ASSIGN_OR_RETURN(l.rank, number_of(*rank));
  ASSIGN_OR_RETURN(l.size, number_of(*size));
  if (const auto v = first_of(e, {"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"})) {
    ASSIGN_OR_RETURN(const int local, number_of(*v));
    if (local == l.size) l.nodes = 1;
  }
  if (const auto v = first_of(e, {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid",
                                  "OMPI_MCA_orte_ess_jobid", "PMI_JOBID"})) {
    l.job = "mpirun " + v->text;
  }
  if (l.nodes == 1) l.port = port_of_job(l.job);
  return std::optional<Launched>(std::move(l));
}

// A step of srun. The batch script of sbatch sees some of these variables too, but not the step's
// number of tasks.
Result<std::optional<Launched>> from_slurm(const Environment& e) {
  const auto rank = first_of(e, {"SLURM_PROCID"});
  const auto step = first_of(e, {"SLURM_STEP_ID", "SLURM_STEPID"});
  const auto size = first_of(e, {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"});
  if (!rank || !step || !size) return std::optional<Launched>();
  Launched l{.launcher = "Slurm"};
  ASSIGN_OR_RETURN(l.rank, number_of(*rank));
  ASSIGN_OR_RETURN(l.size, number_of(*size));
  if (const auto v = first_of(e, {"SLURM_NODEID"})) {
    ASSIGN_OR_RETURN(l.node, number_of(*v));
  }
  if (const auto v = first_of(e, {"SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"})) {
    ASSIGN_OR_RETURN(l.nodes, number_of(*v));
  }
  const auto list = first_of(e, {"SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"});
  if (list) {
    l.host = first_host(list->text);
    if (l.host.empty()) {
      return Status::usage(fmt::format(
          "{}={} is no list of hosts; give --dist-init-addr HOST:PORT of the host of rank 0",
          list->name, list->text));
    }
  } else {
    // Where srun runs: right only if that is the first node, but all that is left.
    l.host = text_of(e, "SLURM_LAUNCH_NODE_IPADDR");
  }
  l.job = fmt::format("Slurm {}.{}", text_of(e, "SLURM_JOB_ID"), step->text);
  l.port = port_of_job(l.job);
  return std::optional<Launched>(std::move(l));
}

Status check_flags(const LaunchFlags& f) {
  if (f.nnodes < 0 || f.node_rank < -1 || f.ep_size < 0) {
    return Status::usage("--ep-size and --nnodes must be at least 1, and --node-rank at least 0");
  }
  return Status::ok();
}

// "host:port" or "[v6]:port".
Status parse_address(const std::string& text, std::string& host, int& port) {
  const size_t colon = text.rfind(':');
  std::optional<int> value;
  if (colon != std::string::npos) {
    host = text.substr(0, colon);
    value = number(std::string_view(text).substr(colon + 1));
    if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
      host = host.substr(1, host.size() - 2);
    } else if (host.find(':') != std::string::npos) {
      host.clear();
    }
  }
  if (host.empty() || !value || *value < 1 || *value > 65535) {
    return Status::usage(
        fmt::format("--dist-init-addr {} is no address: give HOST:PORT of the host "
                    "of rank 0, with a port from 1 to 65535",
                    text));
  }
  port = *value;
  return Status::ok();
}

Result<LaunchPlan> plan_launched(const Launched& l, const LaunchFlags& f) {
  const auto contradiction = [&](const char* flag, int given, const char* what, int said) {
    return Status::usage(
        fmt::format("{} {}, but {} says {} {}: each process is one rank there; leave {} out", flag,
                    given, l.launcher, what, said, flag));
  };
  if (l.rank >= l.size) {
    return Status::usage(fmt::format(
        "{} says rank {} of {} ranks, which cannot be; see its variables in the environment",
        l.launcher, l.rank, l.size));
  }
  if (f.ep_size != 0 && f.ep_size != l.size) {
    return contradiction("--ep-size", f.ep_size, "world size", l.size);
  }
  if (f.nnodes != 0 && l.nodes != 0 && f.nnodes != l.nodes) {
    return contradiction("--nnodes", f.nnodes, "number of nodes", l.nodes);
  }
  if (f.node_rank >= 0 && l.node >= 0 && f.node_rank != l.node) {
    return contradiction("--node-rank", f.node_rank, "node", l.node);
  }
  LaunchPlan plan{.launcher = l.launcher,
                  .size = l.size,
                  .rank = l.rank,
                  .nodes = l.nodes == 0 ? 2 : l.nodes,
                  .host = l.host,
                  .port = l.port,
                  .job = l.job};
  if (!f.dist_init_addr.empty()) {
    RETURN_IF_ERROR(parse_address(f.dist_init_addr, plan.host, plan.port));
  } else if (plan.one_host()) {
    plan.host = "127.0.0.1";  // whatever name the launcher has for this host
  }
  if (plan.host.empty() || plan.port < 1 || plan.port > 65535) {
    return Status::usage(
        fmt::format("{} does not say where rank 0 listens{}; give --dist-init-addr HOST:PORT of "
                    "the host of rank 0",
                    l.launcher, l.launcher == "torchrun" ? " (MASTER_ADDR, MASTER_PORT)" : ""));
  }
  return plan;
}

Result<LaunchPlan> plan_by_flags(const LaunchFlags& f) {
  LaunchPlan plan{.size = f.ep_size == 0 ? 1 : f.ep_size};
  const int nodes = f.nnodes == 0 ? 1 : f.nnodes;
  if (nodes == 1) {
    if (f.node_rank > 0) {
      return Status::usage(fmt::format(
          "--node-rank {} needs --nnodes, the number of nodes, which is above it", f.node_rank));
    }
    if (!f.dist_init_addr.empty()) {  // harmless, but it must be an address
      std::string host;
      int port = 0;
      RETURN_IF_ERROR(parse_address(f.dist_init_addr, host, port));
    }
    plan.here = plan.size;
    return plan;
  }
  if (f.node_rank < 0 || f.dist_init_addr.empty() || f.ep_size == 0) {
    return Status::usage(fmt::format(
        "--nnodes {} needs {} too: every node is started with --ep-size (ranks of all nodes), "
        "--nnodes, --node-rank and --dist-init-addr HOST:PORT of node 0",
        nodes,
        f.node_rank < 0            ? "--node-rank"
        : f.dist_init_addr.empty() ? "--dist-init-addr"
                                   : "--ep-size"));
  }
  if (f.node_rank >= nodes) {
    return Status::usage(fmt::format("--node-rank {} does not fit --nnodes {}: nodes count from 0",
                                     f.node_rank, nodes));
  }
  if (f.ep_size % nodes != 0) {
    return Status::usage(
        fmt::format("--ep-size {} does not spread over --nnodes {}: every node has "
                    "as many ranks",
                    f.ep_size, nodes));
  }
  plan.nodes = nodes;
  plan.here = f.ep_size / nodes;
  plan.rank = f.node_rank * plan.here;
  RETURN_IF_ERROR(parse_address(f.dist_init_addr, plan.host, plan.port));
  return plan;
}

}  // namespace

Environment process_environment() {
  Environment all;
  for (char** e = environ; *e != nullptr; ++e) {
    const std::string_view line(*e);
    const size_t equals = line.find('=');
    if (equals != std::string_view::npos)
      all.emplace(line.substr(0, equals), line.substr(equals + 1));
  }
  return all;
}

std::string first_host(std::string_view list) {
  std::string host;
  for (size_t i = 0; i < list.size() && list[i] != ','; ++i) {
    if (list[i] == ']') return "";
    if (list[i] != '[') {
      host += list[i];
      continue;
    }
    const size_t close = list.find(']', i);
    if (close == std::string_view::npos) return "";
    const std::string_view inside = list.substr(i + 1, close - i - 1);
    const std::string_view first = inside.substr(0, inside.find_first_of(",-"));
    if (first.empty()) return "";
    host += first;
    i = close;
  }
  // Only what a host's name can have; the list comes from outside.
  for (const char c : host) {
    const bool good = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                      c == '-' || c == '.' || c == '_';
    if (!good) return "";
  }
  return host;
}

Result<LaunchPlan> plan_launch(const LaunchFlags& flags, const Environment& environment) {
  RETURN_IF_ERROR(check_flags(flags));
  for (const auto from : {from_torchrun, from_mpirun, from_slurm}) {
    ASSIGN_OR_RETURN(const std::optional<Launched> launched, from(environment));
    if (!launched || (launched->size <= 1 && launched->rank == 0)) continue;
    if (launched->size > kMaxRanks) {
      return Status::usage(fmt::format("{} started {} processes, and a group has at most {} ranks",
                                       launched->launcher, launched->size, kMaxRanks));
    }
    return plan_launched(*launched, flags);
  }
  return plan_by_flags(flags);
}

}  // namespace sortie::exchange
