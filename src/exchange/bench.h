#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "exchange/exchange.h"

namespace sortie::exchange {

struct BenchFormat {
  std::string name;
  int64_t row_bytes = 0;
};

struct BenchOptions {
  int ranks = 2;
  int experts = 256;
  int topk = 8;
  int64_t hidden = 7168;
  std::vector<int64_t> tokens = {1, 2, 4, 8, 16, 32, 64, 128};  // of each rank
  std::vector<BenchFormat> formats;  // empty: those of the wire (docs/exchange.md) at `hidden`
  int repeats = 200;
  bool sockets = false;  // measure plain sockets beside (BenchRow::socket_us)
};

struct BenchRow {
  std::string format;
  int64_t row_bytes = 0;
  int64_t tokens = 0;
  int64_t bytes = 0;       // rows and parts that a rank writes, to others and to itself
  int64_t sent_bytes = 0;  // those to others
  double us = 0;           // dispatch + combine, median
  double copy_us = 0;      // one memcpy of the same bytes, median, all ranks at once
  // Two plain TCP sockets of the loopback device that send sent_bytes to each other at once, at
  // rank 0 while the others wait; median. 0 unless asked for.
  double socket_us = 0;
};

// What the ranks' windows must hold: for Options::window_bytes of the transports.
Options exchange_options(const BenchOptions& options);

// Times dispatch + combine of random tokens. Collective; each rank gets its own times.
Result<std::vector<BenchRow>> bench_exchange(const std::shared_ptr<Transport>& transport,
                                             const BenchOptions& options);
// The same over threads of this process; rank 0's times.
Result<std::vector<BenchRow>> bench_exchange_local(const BenchOptions& options);

}  // namespace sortie::exchange
