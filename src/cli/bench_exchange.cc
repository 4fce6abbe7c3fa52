#include "cli/bench_exchange.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "exchange/bench.h"
#if SORTIE_HAS_UCX
#include "exchange/ucx.h"
#endif

namespace sortie::cli {

namespace {

using exchange::BenchRow;

// The rows of rank 0, with every rank a process; nothing at the other ranks.
Result<std::vector<BenchRow>> over_processes(const exchange::BenchOptions& bench,
                                             const Launch& launch) {
#if SORTIE_HAS_UCX
  constexpr double kStartSeconds = 60;
  auto group = launch.child ? exchange::ProcessGroup::join(*launch.child, seconds(kStartSeconds))
                            : exchange::ProcessGroup::start(launch.argc, launch.argv, bench.ranks,
                                                            seconds(kStartSeconds));
  RETURN_IF_ERROR(group.status());
  const bool front = (*group)->rank() == 0;
  ASSIGN_OR_RETURN(auto transport,
                   exchange::make_ucx_transport(
                       (*group)->shared_control(),
                       {.window_bytes = exchange::exchange_options(bench).window_bytes(bench.ranks),
                        .network_address = "127.0.0.1",
                        .force_network = bench.sockets}));
  ASSIGN_OR_RETURN(auto rows, exchange::bench_exchange(transport, bench));
  if (front) fmt::print("lane to rank 1: {}\n", transport->lane(1));
  transport.reset();
  RETURN_IF_ERROR((*group)->close(seconds(5)));
  return front ? std::move(rows) : std::vector<BenchRow>{};
#else
  (void)bench;
  (void)launch;
  return Status::usage("--moe-a2a-backend ucx is not in this build (SORTIE_UCX=OFF): take local");
#endif
}

}  // namespace

Status bench_exchange_command(BenchExchangeOptions o, const Launch& launch) {
  const exchange::BenchOptions bench{.ranks = o.ep_size,
                                     .experts = o.experts,
                                     .topk = o.topk,
                                     .hidden = o.hidden,
                                     .tokens = o.tokens,
                                     .repeats = o.repeats,
                                     .sockets = o.lane == "tcp"};
  if (o.ep_size < 2 || (o.ep_size & (o.ep_size - 1)) != 0 || o.experts % o.ep_size != 0) {
    return Status::usage(fmt::format(
        "--ep-size {} does not fit: a power of two, at least 2, that divides {} experts", o.ep_size,
        o.experts));
  }
  if (o.a2a_backend == "auto") o.a2a_backend = SORTIE_HAS_UCX ? "ucx" : "local";
  if (o.a2a_backend != "ucx" && o.a2a_backend != "local") {
    return Status::usage(
        fmt::format("--moe-a2a-backend {} is unknown here: take ucx or local", o.a2a_backend));
  }
  if ((o.lane != "auto" && o.lane != "tcp") || (o.lane == "tcp" && o.a2a_backend != "ucx")) {
    return Status::usage(
        fmt::format("--lane {} is unknown here: take auto, or tcp with ucx", o.lane));
  }
  ASSIGN_OR_RETURN(const std::vector<BenchRow> rows, o.a2a_backend == "ucx"
                                                         ? over_processes(bench, launch)
                                                         : exchange::bench_exchange_local(bench));
  for (const BenchRow& r : rows) {
    if (o.json) {
      fmt::print("{}\n", nlohmann::ordered_json{{"bench", "exchange"},
                                                {"backend", o.a2a_backend},
                                                {"ranks", o.ep_size},
                                                {"wire", r.format},
                                                {"row_bytes", r.row_bytes},
                                                {"tokens", r.tokens},
                                                {"bytes", r.bytes},
                                                {"us", r.us},
                                                {"copy_us", r.copy_us},
                                                {"sent_bytes", r.sent_bytes},
                                                {"socket_us", r.socket_us}}
                             .dump());
      continue;
    }
    fmt::print(
        "{:<10} {:4} tokens a rank: dispatch + combine {:9.1f} us  {:6.2f} MB, memcpy of as much "
        "{:9.1f} us  "
        "{:4.2f} x\n",
        r.format, r.tokens, r.us, static_cast<double>(r.bytes) * 1e-6, r.copy_us, r.us / r.copy_us);
    if (r.socket_us > 0) {
      fmt::print("           {:6.2f} MB to others; plain sockets {:9.1f} us  {:4.2f} x\n",
                 static_cast<double>(r.sent_bytes) * 1e-6, r.socket_us, r.us / r.socket_us);
    }
  }
  return Status::ok();
}

}  // namespace sortie::cli
