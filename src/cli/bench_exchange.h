#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "cli/ranks.h"

namespace sortie::cli {

struct BenchExchangeOptions {
  int ep_size = 2;
  std::string a2a_backend = "auto";  // ucx (processes) where it is built in, or local (threads)
  std::string lane = "auto";         // auto, or tcp: as between hosts, over the loopback device
  std::vector<int64_t> tokens = {1, 2, 4, 8, 16, 32, 64, 128};  // a rank
  int64_t hidden = 7168;
  int topk = 8;
  int experts = 256;
  int repeats = 200;
  bool json = false;
};

// sortie bench exchange: dispatch + combine between the ranks of this host in each wire form, us
// beside a memcpy of the same bytes, and over TCP beside plain sockets.
Status bench_exchange_command(BenchExchangeOptions options, const Launch& launch);

}  // namespace sortie::cli
