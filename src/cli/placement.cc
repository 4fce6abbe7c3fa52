#include "cli/placement.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>

#include "base/threads.h"

namespace sortie::cli {

namespace {

struct Range {
  const std::byte* begin;
  const std::byte* end;
};

// Matrices that stand side by side as one, so that moving them cuts few huge pages.
std::vector<Range> joined(std::vector<Range> ranges) {
  constexpr ptrdiff_t kGap = 4096;
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.begin < b.begin; });
  std::vector<Range> out;
  for (const Range& r : ranges) {
    if (!out.empty() && r.begin - out.back().end < kGap) {
      out.back().end = std::max(out.back().end, r.end);
    } else {
      out.push_back(r);
    }
  }
  return out;
}

std::string list(const std::vector<int>& cpus) {
  std::string text;
  for (size_t i = 0; i < cpus.size();) {
    size_t end = i + 1;
    while (end < cpus.size() && cpus[end] == cpus[end - 1] + 1) ++end;
    text += fmt::format("{}{}", text.empty() ? "" : ",", cpus[i]);
    if (end - i > 1) text += fmt::format("-{}", cpus[end - 1]);
    i = end;
  }
  return text;
}

}  // namespace

std::vector<RankPlace> place_on_host(int ranks, int threads) {
  std::vector<RankPlace> places = place_ranks(numa_nodes(), allowed_cpus(), ranks, threads);
  if (ranks * threads > available_cpus()) std::fill(places.begin(), places.end(), RankPlace{});
  return places;
}

void move_weights(const model::Weights& weights, int node, bool all) {
  const auto prefer = [&](const std::byte* begin, const std::byte* end) {
    prefer_node(begin, static_cast<size_t>(end - begin), node);
  };
  if (all) {
    for (const AlignedBuffer& b : *weights.owned) prefer(b.data(), b.data() + b.size());
    return;
  }
  std::vector<Range> ranges;
  const auto add = [&](const std::vector<quant::Matrix>& matrices) {
    for (const quant::Matrix& m : matrices) {
      if (m.codes != nullptr) ranges.push_back({m.codes, m.codes + m.n * m.code_row_bytes()});
    }
  };
  const auto add_layer = [&](const model::LayerWeights& layer) {
    add(layer.moe.gate_up);
    add(layer.moe.down);
  };
  for (const model::LayerWeights& layer : weights.layers) add_layer(layer);
  for (const model::MtpWeights& m : weights.mtp) add_layer(m.layer);
  for (const Range& r : joined(std::move(ranges))) prefer(r.begin, r.end);
}

std::string describe(const std::vector<RankPlace>& places) {
  std::string text;
  for (size_t r = 0; r < places.size(); ++r) {
    const RankPlace& p = places[r];
    text += fmt::format("{}rank {}: ", r == 0 ? "" : "; ", r);
    text += p.node < 0 ? "no node" : fmt::format("node {}", p.node);
    text += p.cpus.empty() ? ", not pinned" : ", CPUs " + list(p.cpus);
  }
  return text;
}

std::string describe_nodes(const std::vector<NumaNode>& nodes) {
  if (nodes.empty()) return "the system names none";
  std::string text = fmt::format("{}", nodes.size());
  for (size_t i = 0; i < nodes.size(); ++i) {
    text +=
        fmt::format("{} node {}: CPUs {}", i == 0 ? ";" : ",", nodes[i].id, list(nodes[i].cpus));
  }
  return text;
}

std::string huge_pages() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string modes;
  std::getline(file, modes);
  if (modes.find("[always]") != std::string::npos) return "always: used for weights and cache";
  if (modes.find("[madvise]") != std::string::npos) {
    return "on request (madvise): used for weights and cache";
  }
  return "off: weights are read more slowly; write madvise to "
         "/sys/kernel/mm/transparent_hugepage/enabled";
}

}  // namespace sortie::cli
