#include "exchange/launch/launch_plan.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace sortie::exchange {
namespace {

TEST(LaunchPlan, FirstHostOfSlurmLists) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"node1", "node1"},
      {"node1,node2", "node1"},
      {"gpu[03-07,9]", "gpu03"},
      {"gpu[5]", "gpu5"},
      {"gpu[5,7-9],login1", "gpu5"},
      {"rack[2-3]node[01-16]", "rack2node01"},
      {"a-b[1-2].example.org,c", "a-b1.example.org"},
      {"10.0.0.7,10.0.0.8", "10.0.0.7"},
      {"", ""},
      {"gpu[03", ""},
      {"gpu[]", ""},
      {"gpu]", ""},
      {"$(reboot)", ""},
      {",node1", ""},
  };
  for (const auto& [list, host] : cases) EXPECT_EQ(first_host(list), host) << list;
}

// As the launchers set them (variables that say nothing about the place left out).
const Environment kTorchrun = {{"RANK", "3"},
                               {"WORLD_SIZE", "4"},
                               {"LOCAL_RANK", "1"},
                               {"LOCAL_WORLD_SIZE", "2"},
                               {"GROUP_RANK", "1"},
                               {"GROUP_WORLD_SIZE", "2"},
                               {"ROLE_RANK", "3"},
                               {"ROLE_WORLD_SIZE", "4"},
                               {"MASTER_ADDR", "10.1.0.5"},
                               {"MASTER_PORT", "29500"},
                               {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                               {"TORCHELASTIC_RUN_ID", "none"}};
const Environment kTorchrunOneHost = {{"RANK", "1"},
                                      {"WORLD_SIZE", "2"},
                                      {"LOCAL_RANK", "1"},
                                      {"LOCAL_WORLD_SIZE", "2"},
                                      {"GROUP_RANK", "0"},
                                      {"MASTER_ADDR", "laptop.lan"},
                                      {"MASTER_PORT", "41873"},
                                      {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                      {"TORCHELASTIC_RUN_ID", "7f0c"}};
const Environment kByHand = {
    {"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "10.1.0.5"}, {"MASTER_PORT", "29500"}};
const Environment kOpenMpi4 = {{"OMPI_COMM_WORLD_RANK", "2"},
                               {"OMPI_COMM_WORLD_SIZE", "4"},
                               {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                               {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                               {"OMPI_COMM_WORLD_NODE_RANK", "0"},
                               {"OMPI_MCA_ess_base_jobid", "3473211393"},
                               {"PMIX_RANK", "2"},
                               {"PMIX_NAMESPACE", "3473211393"}};
const Environment kOpenMpiOneHost = {{"OMPI_COMM_WORLD_RANK", "1"},
                                     {"OMPI_COMM_WORLD_SIZE", "4"},
                                     {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                     {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                                     {"PMIX_RANK", "1"},
                                     {"PMIX_NAMESPACE", "prterun-laptop-4711@1"}};
const Environment kHydra = {{"PMI_RANK", "1"},
                            {"PMI_SIZE", "2"},
                            {"PMI_FD", "8"},
                            {"MPI_LOCALRANKID", "0"},
                            {"MPI_LOCALNRANKS", "1"}};
const Environment kSrun = {{"SLURM_JOB_ID", "812"},
                           {"SLURM_STEP_ID", "0"},
                           {"SLURM_STEPID", "0"},
                           {"SLURM_PROCID", "5"},
                           {"SLURM_LOCALID", "1"},
                           {"SLURM_NODEID", "2"},
                           {"SLURM_NTASKS", "8"},
                           {"SLURM_NPROCS", "8"},
                           {"SLURM_STEP_NUM_TASKS", "8"},
                           {"SLURM_STEP_NUM_NODES", "4"},
                           {"SLURM_NNODES", "4"},
                           {"SLURM_JOB_NODELIST", "cpu[001-004]"},
                           {"SLURM_STEP_NODELIST", "cpu[001-004]"},
                           {"SLURM_LAUNCH_NODE_IPADDR", "10.9.9.9"},
                           {"PMI_RANK", "5"},
                           {"PMI_SIZE", "8"}};

Environment with(Environment e, const std::string& name, const std::string& value) {
  if (value.empty()) {
    e.erase(name);
  } else {
    e[name] = value;
  }
  return e;
}

LaunchFlags flags(int ep_size = 0, const std::string& address = "", int nnodes = 0,
                  int node_rank = -1) {
  LaunchFlags f;
  f.ep_size = ep_size;
  f.dist_init_addr = address;
  f.nnodes = nnodes;
  f.node_rank = node_rank;
  return f;
}

struct Case {
  std::string name;
  Environment environment;
  LaunchFlags flags;
  // launcher, size, rank, here, nodes, host and port.
  std::string launcher;
  int size = 0;
  int rank = 0;
  int here = 1;
  int nodes = 1;
  std::string host;
  int port = 0;  // 0 = any of the range for jobs
};

TEST(LaunchPlan, TableOfEnvironments) {
  const LaunchFlags at = flags(0, "10.1.0.5:5000");
  const std::vector<Case> good = {
      {"nothing", {}, flags(), "", 1, 0, 1, 1, "", 0},
      {"one host", {}, flags(4), "", 4, 0, 4, 1, "", 0},
      {"one node", {}, flags(4, "h:5000", 1, 0), "", 4, 0, 4, 1, "", 0},
      {"node 0", {}, flags(4, "h:5000", 2, 0), "", 4, 0, 2, 2, "h", 5000},
      {"node 1", {}, flags(4, "h:5000", 2, 1), "", 4, 2, 2, 2, "h", 5000},
      {"v6", {}, flags(4, "[fd00::1]:5000", 4, 3), "", 4, 3, 1, 4, "fd00::1", 5000},
      {"torchrun", kTorchrun, flags(), "torchrun", 4, 3, 1, 2, "10.1.0.5", 29501},
      {"torchrun and flags that agree", kTorchrun, flags(4, "", 2, 1), "torchrun", 4, 3, 1, 2,
       "10.1.0.5", 29501},
      {"torchrun on one host", kTorchrunOneHost, flags(), "torchrun", 2, 1, 1, 1, "127.0.0.1",
       41874},
      {"torchrun, moved", kTorchrun, at, "torchrun", 4, 3, 1, 2, "10.1.0.5", 5000},
      {"torchrun, last port", with(kTorchrun, "MASTER_PORT", "65535"), flags(), "torchrun", 4, 3, 1,
       2, "10.1.0.5", 65534},
      {"by hand", kByHand, flags(), "torchrun", 2, 0, 1, 2, "10.1.0.5", 29500},
      {"one process of torchrun", with(with(kByHand, "WORLD_SIZE", "1"), "MASTER_ADDR", ""),
       flags(4), "", 4, 0, 4, 1, "", 0},
      {"Open MPI", kOpenMpi4, at, "mpirun", 4, 2, 1, 2, "10.1.0.5", 5000},
      {"Open MPI on one host", kOpenMpiOneHost, flags(), "mpirun", 4, 1, 1, 1, "127.0.0.1", 0},
      {"Hydra", kHydra, at, "mpirun", 2, 1, 1, 2, "10.1.0.5", 5000},
      {"srun", kSrun, flags(), "Slurm", 8, 5, 1, 4, "cpu001", 0},
      {"srun, moved", kSrun, at, "Slurm", 8, 5, 1, 4, "10.1.0.5", 5000},
      {"srun without a list",
       with(with(kSrun, "SLURM_STEP_NODELIST", ""), "SLURM_JOB_NODELIST", ""), flags(), "Slurm", 8,
       5, 1, 4, "10.9.9.9", 0},
      {"srun on one host", with(kSrun, "SLURM_STEP_NUM_NODES", "1"), flags(), "Slurm", 8, 5, 1, 1,
       "127.0.0.1", 0},
      {"one task of srun in an allocation of eight",
       with(with(kSrun, "SLURM_STEP_NUM_TASKS", "1"), "SLURM_PROCID", "0"), flags(2), "", 2, 0, 2,
       1, "", 0},
      {"a shell in an allocation",
       {{"SLURM_JOB_ID", "812"},
        {"SLURM_PROCID", "0"},
        {"SLURM_NTASKS", "8"},
        {"SLURM_NNODES", "4"}},
       flags(2),
       "",
       2,
       0,
       2,
       1,
       "",
       0},
      {"torchrun within mpirun",
       [] {
         Environment e = kOpenMpi4;
         for (const auto& [k, v] : kTorchrun) e[k] = v;
         return e;
       }(),
       flags(), "torchrun", 4, 3, 1, 2, "10.1.0.5", 29501},
  };
  for (const Case& c : good) {
    const auto plan = plan_launch(c.flags, c.environment);
    ASSERT_TRUE(plan.is_ok()) << c.name << ": " << plan.status().message();
    EXPECT_EQ(plan->launcher, c.launcher) << c.name;
    EXPECT_EQ(plan->size, c.size) << c.name;
    EXPECT_EQ(plan->rank, c.rank) << c.name;
    EXPECT_EQ(plan->here, c.here) << c.name;
    EXPECT_EQ(plan->nodes, c.nodes) << c.name;
    EXPECT_EQ(plan->host, c.host) << c.name;
    if (c.port != 0) {
      EXPECT_EQ(plan->port, c.port) << c.name;
    } else if (plan->meets()) {
      EXPECT_TRUE(plan->port >= 15000 && plan->port < 32000) << c.name << " " << plan->port;
    }
  }
}

TEST(LaunchPlan, Contradictions) {
  struct Wrong {
    Environment environment;
    LaunchFlags flags;
    std::vector<std::string> words;
  };
  const std::vector<Wrong> wrong = {
      {kTorchrun, flags(8), {"--ep-size 8", "torchrun", "world size 4"}},
      {kTorchrun, flags(0, "", 4), {"--nnodes 4", "number of nodes 2"}},
      {kTorchrun, flags(0, "", 0, 0), {"--node-rank 0", "node 1"}},
      {kSrun, flags(4), {"--ep-size 4", "Slurm", "8"}},
      {kOpenMpi4, flags(), {"mpirun", "--dist-init-addr"}},
      {with(kTorchrun, "MASTER_ADDR", ""), flags(), {"MASTER_ADDR", "--dist-init-addr"}},
      {with(kTorchrun, "MASTER_PORT", "70000"), flags(), {"MASTER_PORT"}},
      {with(kTorchrun, "RANK", "4"), flags(), {"rank 4 of 4"}},
      {with(kTorchrun, "RANK", "-1"), flags(), {"RANK=-1", "not a number"}},
      {with(kTorchrun, "WORLD_SIZE", "x"), flags(), {"WORLD_SIZE=x"}},
      {with(kTorchrun, "WORLD_SIZE", "128"), flags(), {"128", "64"}},
      {with(kSrun, "SLURM_STEP_NODELIST", "cpu[1"), flags(), {"SLURM_STEP_NODELIST=cpu[1"}},
      {{}, flags(4, "h:5000", 2, -1), {"--node-rank"}},
      {{}, flags(4, "", 2, 0), {"--dist-init-addr"}},
      {{}, flags(0, "h:5000", 2, 0), {"--ep-size"}},
      {{}, flags(4, "h:5000", 2, 2), {"--node-rank 2", "--nnodes 2"}},
      {{}, flags(4, "h:5000", 3, 2), {"--ep-size 4", "--nnodes 3"}},
      {{}, flags(0, "", 0, 1), {"--node-rank 1", "--nnodes"}},
      {{}, flags(4, "h", 2, 0), {"--dist-init-addr h"}},
      {{}, flags(4, ":5000", 2, 0), {"--dist-init-addr"}},
      {{}, flags(4, "h:0", 2, 0), {"--dist-init-addr"}},
      {{}, flags(4, "fd00::1:5000", 2, 0), {"--dist-init-addr"}},
      {{}, flags(4, "h:5000x", 2, 0), {"--dist-init-addr"}},
  };
  for (const Wrong& w : wrong) {
    const auto plan = plan_launch(w.flags, w.environment);
    ASSERT_FALSE(plan.is_ok()) << w.words[0];
    EXPECT_EQ(plan.status().code(), StatusCode::kUsage);
    for (const std::string& word : w.words) {
      EXPECT_NE(plan.status().message().find(word), std::string::npos)
          << word << ": " << plan.status().message();
    }
  }
}

// All processes of a job must choose one port, and another job another.
TEST(LaunchPlan, ThePortFollowsFromTheJob) {
  const auto five = plan_launch({}, kSrun);
  const auto six = plan_launch({}, with(kSrun, "SLURM_PROCID", "6"));
  const auto other = plan_launch({}, with(kSrun, "SLURM_JOB_ID", "813"));
  EXPECT_EQ(five->port, six->port);
  EXPECT_NE(five->port, other->port);
  EXPECT_NE(five->job, other->job);
}

}  // namespace
}  // namespace sortie::exchange
