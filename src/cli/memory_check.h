#pragma once

#include <span>
#include <string>
#include <vector>

#include "base/memory.h"
#include "base/status.h"
#include "cli/ranks.h"
#include "exchange/control.h"
#include "model/plan.h"
#include "model/weights.h"

namespace sortie::cli {

// What the ranks of one host take together, in bytes.
struct HostNeeds {
  int64_t weights = 0;
  int64_t cache = 0;
  int64_t exchange = 0;  // windows and parts
  int64_t scratch = 0;   // activations of the largest step, rope table
  int64_t total() const;
};

// What the ranks of a host are asked to hold. All ranks have equal shares.
struct HostLoad {
  int ranks = 1;            // of the group, on this host
  int processes = 1;        // that they are spread over
  int64_t cache_token = 0;  // bytes of one position of the latent cache
  HostNeeds needs;
};

// The exchange's and the model's sizes as resolved flags have them.
exchange::Options exchange_options(const model::Config& config, const RunOptions& options);
model::RankLoad rank_load(const model::Config& config, const RunOptions& options);

// `ranks` of the group on one host, with these weights.
HostLoad host_load(const model::Config& config, const RunOptions& options,
                   const model::WeightBytes& weights, int ranks);

// The positions that --mem-fraction-static leaves for each rank's cache: that fraction of what is
// free, less the weights; whole pages, no more than all running requests can use.
Result<int64_t> tokens_by_fraction(const RunOptions& options, const HostLoad& load, int64_t free);

// Another form that the model could take, and what its host would then need.
struct OtherForm {
  std::string name;  // "w4afp8"
  std::string how;   // the flag or command that gives it
  int64_t bytes = 0;
};

// ok, or "needs 31.2 GiB, 22.9 are free": parts, what limits, and the forms or the cache that fit.
Status check_fits(const std::string& model, const RunOptions& options, const HostLoad& load,
                  const FreeMemory& free, std::span<const OtherForm> others);

// The forms that the checkpoint could be quantised to, while loading or by `sortie quantize`.
std::vector<OtherForm> other_forms(const model::Config& config, const RunOptions& options,
                                   int ranks);

// Weights by the checkpoint's headers, or by the config alone where the folder has no tensors.
Result<model::WeightBytes> planned_weights(const model::Config& config, const RunOptions& options);

// The check that every command makes before it loads: sizes the cache if --mem-fraction-static
// shall, and compares each host of the group with what its ranks need together. Collective where
// `control` is not null: all ranks come to the same answer. Returns what is planned for this host.
Result<HostLoad> plan_memory(const model::Config& config, RunOptions& options,
                             exchange::Control* control);

// "weights 1.2, cache 0.3, exchange 0.1, scratch 0.1 GiB".
std::string parts(const HostNeeds& needs);

}  // namespace sortie::cli
