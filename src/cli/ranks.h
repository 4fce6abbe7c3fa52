#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"
#include "base/threads.h"
#include "exchange/exchange.h"
#include "exchange/launcher.h"
#include "model/model.h"
#include "model/plan.h"

namespace sortie::cli {

// The flags that every command which runs a model shares; names follow SGLang's.
struct RunOptions {
  std::string model;           // MODEL or --model-path
  std::string device = "cpu";  // cpu | cuda | reference
  int ep_size = 0;             // of all nodes; 0 = 1, or as many as a launcher started
  std::string dist_init_addr;  // HOST:PORT where rank 0 listens
  int nnodes = 0;              // 0 = 1, or what a launcher says
  int node_rank = -1;          // -1 = 0, or what a launcher says
  std::string cluster_key_file;
  bool insecure = false;             // no key between hosts
  std::string a2a_backend = "auto";  // auto | local | ucx (deepep = auto)
  std::string deepep_mode = "auto";  // auto | low_latency | normal
  std::string quantization;          // empty, or bf16 | fp8_block (fp8) | w4afp8 | w8a8_int8
  std::string dense;                 // empty or fp8_block
  std::string calibrate;             // w4afp8: JSON lines for static activation scales
  int threads = 0;                   // a rank; 0 = the rank's share of the CPUs
  int max_running_requests = 16;
  int64_t chunked_prefill_size = 256;
  int64_t context_length = 0;  // 0 = the model's, at most 8192
  int64_t page_size = 64;
  int64_t max_total_tokens = 0;  // latent cache of a rank; 0 = enough for all running requests
  std::string kv_cache_dtype = "auto";  // auto (bf16 on a GPU, else fp32), fp32 or bf16
  double mem_fraction_static = 0;       // or: of the free memory, for weights and cache together
  int64_t decode_segment = 0;           // 0 = the default
  int64_t max_dispatch_tokens = 0;      // 0 = max_running_requests
  double exchange_timeout = 10;
  double step_timeout = 300;
  double dist_timeout = 60;
  std::string on_rank_loss = "fail";
  bool mtp = false;     // keep caches for the MTP layers
  std::string profile;  // file for a timeline of all ranks
  bool quiet = false;   // no plan, no progress
};

// How this process was started: its command line, which the launcher runs again for the other
// ranks, and what the launcher told it if it is one of those.
struct Launch {
  int argc = 0;
  char** argv = nullptr;
  std::optional<exchange::ChildArgs> child;
};

// Checks the flags against each other and the model's config, and fills in what 0 leaves open.
Result<model::Config> resolve(RunOptions& options);

Result<exchange::Mode> parse_mode(const std::string& name);
// The latents' format, which resolve() has checked.
quant::Format cache_format(const RunOptions& options);
// `flag` is named in the error.
Result<model::Quantization> parse_quantization(const char* flag, const std::string& name);
// How the flags want the weights loaded, but for what a calibration would add.
Result<model::LoadOptions> load_options(const RunOptions& options);

// The name of a checkpoint's or a flag's quantisation for reports.
std::string quantization_name(const model::Config& config, const RunOptions& options);

// In which formats the checkpoint and the flags hold the matrices.
model::Formats formats_of(const model::Config& config, const RunOptions& options);

// One rank that lives in this process.
struct Rank {
  int index = 0;
  std::unique_ptr<ThreadPool> threads;
  std::unique_ptr<exchange::Exchange> exchange;
  std::unique_ptr<model::Model> model;
};

// The ranks of this process and, with ucx, the group of processes they belong to.
class Ranks {
 public:
  // Starts the group and loads the model.
  static Result<std::unique_ptr<Ranks>> open(RunOptions options, const Launch& launch);
  ~Ranks();

  const RunOptions& options() const { return options_; }
  const model::Config& config() const { return config_; }
  std::vector<Rank>& local() { return ranks_; }
  int size() const { return options_.ep_size; }
  bool is_front() const { return first_rank_ == 0; }
  bool degrade() const { return options_.on_rank_loss == "degrade"; }
  // Null unless the ranks are processes.
  exchange::ProcessGroup* processes() { return processes_.get(); }
  // What was decided, for the plan that run and doctor print: name and text.
  const std::vector<std::pair<std::string, std::string>>& plan() const { return plan_; }
  int64_t weight_bytes() const { return weight_bytes_; }

  // Runs fn on a thread of each local rank and returns the first error by rank. One thread per rank
  // since ranks wait for each other.
  Status on_each(const std::function<Status(Rank&)>& fn);

 private:
  Status connect(const exchange::LaunchPlan& plan, const Launch& launch);
  Status share_cpus();
  Result<std::vector<std::shared_ptr<exchange::Transport>>> transports(int64_t window_bytes);
  Status load();
  Status build();
  Status build_on_gpu(Rank& rank, const ops::BackendOf<bf16>& backend,
                      const exchange::Options& exchange_options,
                      const model::ModelOptions& model_options);

  RunOptions options_;
  model::Config config_;
  int64_t weight_bytes_ = 0;
  int first_rank_ = 0;  // of this process
  // Ranks that use the same CPUs, and this process's first among them.
  int cpu_sharers_ = 1;
  int cpu_share_ = 0;
  // Outlives the ranks, whose transports use it.
  std::unique_ptr<exchange::ProcessGroup> processes_;
  std::vector<std::shared_ptr<const model::Weights>> weights_;
  std::vector<Rank> ranks_;
  std::vector<std::pair<std::string, std::string>> plan_;
};

}  // namespace sortie::cli
