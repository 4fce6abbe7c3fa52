#include "base/numa.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <climits>
#include <cstdint>
#include <fstream>
#include <string_view>

namespace sortie {

namespace {

constexpr int kMostNodes = 1024;

// "0-3,8,10-11", as the kernel writes sets of CPUs and nodes. What is malformed ends the list.
std::vector<int> parse_list(std::string_view text) {
  std::vector<int> numbers;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (at < end) {
    int first = 0;
    auto parsed = std::from_chars(at, end, first);
    if (parsed.ec != std::errc() || first < 0) break;
    int last = first;
    if (parsed.ptr < end && *parsed.ptr == '-') {
      parsed = std::from_chars(parsed.ptr + 1, end, last);
      if (parsed.ec != std::errc() || last < first || last - first > 1 << 16) break;
    }
    for (int i = first; i <= last; ++i) numbers.push_back(i);
    at = parsed.ptr < end && *parsed.ptr == ',' ? parsed.ptr + 1 : end;
  }
  return numbers;
}

std::vector<int> read_list(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return parse_list(line);
}

// The allowed CPUs of each node; those of no node come last, as node -1.
std::vector<NumaNode> free_cpus(const std::vector<NumaNode>& nodes,
                                const std::vector<int>& allowed) {
  std::vector<NumaNode> free;
  std::vector<int> left = allowed;
  for (const NumaNode& n : nodes) {
    NumaNode mine{.id = n.id};
    const auto of_node = [&](int cpu) {
      return std::find(n.cpus.begin(), n.cpus.end(), cpu) != n.cpus.end();
    };
    std::copy_if(left.begin(), left.end(), std::back_inserter(mine.cpus), of_node);
    left.erase(std::remove_if(left.begin(), left.end(), of_node), left.end());
    if (!mine.cpus.empty()) free.push_back(std::move(mine));
  }
  if (!left.empty()) free.push_back({.id = -1, .cpus = std::move(left)});
  return free;
}

// Moves up to `most` CPUs from the front of one list to the back of another.
void take(std::vector<int>& from, int most, std::vector<int>& to) {
  const auto end = from.begin() + std::min<ptrdiff_t>(most, std::ssize(from));
  to.insert(to.end(), from.begin(), end);
  from.erase(from.begin(), end);
}

}  // namespace

std::vector<NumaNode> numa_nodes(const std::string& root) {
  const std::string folder = root + "/sys/devices/system/node/";
  std::vector<NumaNode> nodes;
  for (const int id : read_list(folder + "online")) {
    NumaNode node{.id = id, .cpus = read_list(folder + "node" + std::to_string(id) + "/cpulist")};
    if (!node.cpus.empty()) nodes.push_back(std::move(node));
  }
  return nodes;
}

std::vector<RankPlace> place_ranks(const std::vector<NumaNode>& nodes,
                                   const std::vector<int>& allowed, int ranks, int threads) {
  std::vector<RankPlace> places(static_cast<size_t>(ranks));
  std::vector<NumaNode> free = free_cpus(nodes, allowed);
  if (free.size() == 1) {
    for (RankPlace& p : places) p.node = free[0].id;
  }
  const bool enough = int64_t{ranks} * threads <= std::ssize(allowed);
  if (!enough || (ranks == 1 && free.size() == 1)) return places;

  for (size_t r = 0; r < places.size(); ++r) {
    NumaNode* node = &free[r * free.size() / places.size()];
    if (std::ssize(node->cpus) < threads) {
      node = &*std::max_element(free.begin(), free.end(), [](const NumaNode& a, const NumaNode& b) {
        return a.cpus.size() < b.cpus.size();
      });
    }
    if (std::ssize(node->cpus) < threads) continue;
    take(node->cpus, threads, places[r].cpus);
    places[r].node = node->id;
  }
  for (RankPlace& p : places) {
    for (NumaNode& n : free) take(n.cpus, threads - static_cast<int>(p.cpus.size()), p.cpus);
  }
  return places;
}

// The kernel's own call: libnuma would add a library to wrap it.
bool prefer_node(const void* begin, size_t bytes, int node) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto at = reinterpret_cast<uintptr_t>(begin);
  const uintptr_t first = (at + page - 1) / page * page;
  const uintptr_t end = (at + bytes) / page * page;
  if (node < 0 || node >= kMostNodes) return false;
  if (first >= end) return true;
  constexpr size_t kBits = sizeof(unsigned long) * CHAR_BIT;
  std::array<unsigned long, kMostNodes / kBits> mask{};
  mask[static_cast<size_t>(node) / kBits] = 1UL << (static_cast<size_t>(node) % kBits);
  return syscall(SYS_mbind, first, end - first, MPOL_PREFERRED, mask.data(), kMostNodes + 1,
                 MPOL_MF_MOVE) == 0;
}

}  // namespace sortie
