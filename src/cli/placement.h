#pragma once

#include <string>
#include <vector>

#include "base/numa.h"
#include "model/weights.h"

namespace sortie::cli {

// Places for `ranks` ranks of `threads` threads that share this process's CPUs. Where the cgroup
// grants less time than they would use, nothing is pinned.
std::vector<RankPlace> place_on_host(int ranks, int threads);

// Moves what a rank alone reads to its node: its experts, and with `all` everything that was made
// in memory. Pages of the checkpoint's files stay where the page cache has them.
void move_weights(const model::Weights& weights, int node, bool all);

// "rank 0: node 0, CPUs 0-15; ...", or why nothing is pinned.
std::string describe(const std::vector<RankPlace>& places);

// "2; node 0: CPUs 0-15, node 1: CPUs 16-31"; what doctor says of the nodes and of huge pages.
std::string describe_nodes(const std::vector<NumaNode>& nodes);
std::string huge_pages();

}  // namespace sortie::cli
