#pragma once

#include <cstddef>
#include <string>
#include <vector>

// Memory nodes: which CPUs are near which memory, where ranks go, and how memory follows them.
namespace sortie {

struct NumaNode {
  int id = 0;
  std::vector<int> cpus;  // ascending
};

// The nodes that have CPUs, ascending, from /sys/devices/system/node; empty where the system does
// not say. `root` stands before /sys: tests have a tree of their own there.
std::vector<NumaNode> numa_nodes(const std::string& root = "");

// Where a rank runs: its threads' CPUs (empty = not pinned), and the node that all its CPUs belong
// to (-1 = none, or not known).
struct RankPlace {
  std::vector<int> cpus;
  int node = -1;
};

// Gives `ranks` ranks of `threads` threads each their places among the `allowed` CPUs (ascending).
// Neighbours share a node: rank r wants the node in whose share of the ranks it falls. A rank whose
// node is full takes the emptiest that holds it; one that no node holds is spread over what is left
// and has no node. Nothing is pinned where there are fewer CPUs than threads, nor a single rank
// that has only one node to be on. CPUs that no node names count as one node without a name.
std::vector<RankPlace> place_ranks(const std::vector<NumaNode>& nodes,
                                   const std::vector<int>& allowed, int ranks, int threads);

// Makes a node the first choice for the whole pages of a piece of memory, and moves there those
// that this process alone has touched. False where the system refuses; the memory is as usable as
// before.
bool prefer_node(const void* begin, size_t bytes, int node);

}  // namespace sortie
