#include "exchange/bench.h"

#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

#include "base/threads.h"
#include "exchange/control.h"
#include "exchange/local.h"

namespace sortie::exchange {
namespace {

constexpr int kWarmUp = 20;

std::vector<BenchFormat> formats_of(const BenchOptions& o) {
  if (!o.formats.empty()) return o.formats;
  const int64_t h = o.hidden;
  return {{"fp32", h * 4},
          {"w4afp8 static", h},
          {"w4afp8 dynamic, w8a8", h + 4},
          {"fp8_block", h + (h + 127) / 128 * 4}};
}

double median(std::vector<double>& v) {
  const auto middle = v.begin() + static_cast<ptrdiff_t>(v.size() / 2);
  std::nth_element(v.begin(), middle, v.end());
  return *middle;
}

double us_since(TimePoint began) { return to_seconds(Clock::now() - began) * 1e6; }

// The tokens of one rank, each with distinct random experts.
struct Tokens {
  Tokens(const BenchOptions& o, int64_t n, int64_t row_bytes, int rank)
      : rows(static_cast<size_t>(n * row_bytes)),
        weights(static_cast<size_t>(n * o.topk), 1.0F / static_cast<float>(o.topk)) {
    std::mt19937 random(static_cast<uint32_t>(rank + 1));
    std::vector<int32_t> all(static_cast<size_t>(o.experts));
    std::iota(all.begin(), all.end(), 0);
    for (int64_t t = 0; t < n; ++t) {
      std::shuffle(all.begin(), all.end(), random);
      ids.insert(ids.end(), all.begin(), all.begin() + o.topk);
    }
  }
  std::vector<std::byte> rows;
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

// Rows that lists name, and parts that stand at home: what dispatch and combine brought here.
int64_t slots_in_use(const ExpertRows& rows, int64_t begin, int64_t end) {
  int64_t n = 0;
  for (int64_t s = begin; s < end; ++s) n += rows.slot_offsets[s + 1] > rows.slot_offsets[s];
  return n;
}

// ---- Plain sockets

// A connection of the loopback device.
Result<std::array<UniqueFd, 2>> tcp_pair() {
  const UniqueFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof at;
  auto* address = reinterpret_cast<sockaddr*>(&at);
  std::array<UniqueFd, 2> pair;
  pair[0] = UniqueFd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const bool good = bind(listener.get(), address, length) == 0 && listen(listener.get(), 1) == 0 &&
                    getsockname(listener.get(), address, &length) == 0 &&
                    connect(pair[0].get(), address, length) == 0;
  if (good) pair[1] = UniqueFd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!pair[1].open()) {
    return Status::exhausted(fmt::format("no TCP connection of this host: {}", strerror(errno)));
  }
  const int on = 1;
  for (const UniqueFd& fd : pair) {
    setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }
  return pair;
}

// Sends and receives the same number of bytes, both at once; false if the other side is gone.
bool swap_bytes(const UniqueFd& fd, std::vector<std::byte>& out, std::vector<std::byte>& in) {
  size_t sent = 0;
  size_t got = 0;
  while (sent < out.size() || got < in.size()) {
    const int events = (sent < out.size() ? POLLOUT : 0) | (got < in.size() ? POLLIN : 0);
    pollfd p{.fd = fd.get(), .events = static_cast<short>(events), .revents = 0};
    if (poll(&p, 1, 10'000) <= 0) return false;
    if ((p.revents & POLLOUT) != 0) {
      const ssize_t n = send(fd.get(), out.data() + sent, out.size() - sent, MSG_DONTWAIT);
      if (n < 0 && errno != EAGAIN) return false;
      sent += static_cast<size_t>(std::max<ssize_t>(n, 0));
    }
    if ((p.revents & (POLLIN | POLLHUP | POLLERR)) != 0) {
      const ssize_t n = recv(fd.get(), in.data() + got, in.size() - got, MSG_DONTWAIT);
      if (n == 0 || (n < 0 && errno != EAGAIN)) return false;
      got += static_cast<size_t>(std::max<ssize_t>(n, 0));
    }
  }
  return true;
}

Result<double> measure_sockets(int64_t bytes, int repeats) {
  if (bytes == 0) return 0.0;
  ASSIGN_OR_RETURN(const auto pair, tcp_pair());
  const auto run = [&](const UniqueFd& fd, std::vector<double>& times) {
    std::vector<std::byte> out(static_cast<size_t>(bytes), std::byte{1});
    std::vector<std::byte> in(out.size());
    for (int i = -kWarmUp; i < repeats; ++i) {
      const TimePoint began = Clock::now();
      if (!swap_bytes(fd, out, in)) return false;
      if (i >= 0) times.push_back(us_since(began));
    }
    return true;
  };
  std::vector<double> ours, theirs;
  bool good = true;
  std::thread other([&] { good = run(pair[1], theirs); });
  const bool own = run(pair[0], ours);
  other.join();
  if (!own || !good) return Status::internal("a TCP connection of this host broke");
  return median(ours);
}

Result<BenchRow> measure(Exchange& exchange, const BenchOptions& o, const BenchFormat& format,
                         int64_t n) {
  const Tokens tokens(o, n, format.row_bytes, exchange.rank());
  BenchRow row{.format = format.name, .row_bytes = format.row_bytes, .tokens = n};
  std::vector<double> times;
  for (int i = -kWarmUp; i < o.repeats; ++i) {
    const TimePoint began = Clock::now();
    ASSIGN_OR_RETURN(const ExpertRows rows, exchange.dispatch({.rows = tokens.rows.data(),
                                                               .row_bytes = format.row_bytes,
                                                               .tokens = n,
                                                               .ids = tokens.ids.data(),
                                                               .weights = tokens.weights.data()}));
    ASSIGN_OR_RETURN(const CombinedParts parts, exchange.combine(0, exchange.parts_buffer()));
    if (i >= 0) times.push_back(us_since(began));
    if (i != -kWarmUp) continue;
    // Rows leave for the ranks whose parts come back, and parts leave for the slots in use.
    const int64_t sent =
        std::accumulate(parts.present, parts.present + parts.ranks * parts.max_tokens, int64_t{0});
    const int64_t part_bytes = o.hidden * static_cast<int64_t>(sizeof(float));
    row.bytes = sent * format.row_bytes + slots_in_use(rows, 0, rows.slots) * part_bytes;
    const int64_t own = exchange.rank() * parts.max_tokens;
    const int64_t kept =
        std::accumulate(parts.present + own, parts.present + own + parts.max_tokens, int64_t{0});
    row.sent_bytes = row.bytes - kept * format.row_bytes -
                     slots_in_use(rows, own, own + rows.max_tokens) * part_bytes;
  }
  row.us = median(times);

  std::vector<std::byte> from(static_cast<size_t>(row.bytes), std::byte{1});
  std::vector<std::byte> to(from.size());
  times.clear();
  for (int i = -kWarmUp; i < o.repeats; ++i) {
    const TimePoint began = Clock::now();
    std::memcpy(to.data(), from.data(), to.size());
    asm volatile("" : : "r"(to.data()) : "memory");  // the copy is not to be left out
    if (i >= 0) times.push_back(us_since(began));
  }
  row.copy_us = median(times);
  return row;
}

}  // namespace

Options exchange_options(const BenchOptions& o) {
  int64_t widest = 0;
  for (const BenchFormat& f : formats_of(o)) widest = std::max(widest, f.row_bytes);
  return {.experts = o.experts,
          .topk = o.topk,
          .hidden = o.hidden,
          .widest_row_bytes = widest,
          .max_dispatch_tokens = *std::max_element(o.tokens.begin(), o.tokens.end()),
          .mode = Mode::kLowLatency,
          .spin = available_cpus() >= o.ranks};
}

Result<std::vector<BenchRow>> bench_exchange(const std::shared_ptr<Transport>& transport,
                                             const BenchOptions& options) {
  const Options x = exchange_options(options);
  RETURN_IF_ERROR(check_options(x, transport->size()));
  const auto exchange = make_exchange(transport, x);
  std::vector<BenchRow> rows;
  for (const BenchFormat& format : formats_of(options)) {
    for (const int64_t n : options.tokens) {
      ASSIGN_OR_RETURN(BenchRow row, measure(*exchange, options, format, n));
      if (options.sockets && transport->rank() == 0) {
        ASSIGN_OR_RETURN(row.socket_us, measure_sockets(row.sent_bytes, options.repeats));
      }
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

Result<std::vector<BenchRow>> bench_exchange_local(const BenchOptions& options) {
  const Options x = exchange_options(options);
  RETURN_IF_ERROR(check_options(x, options.ranks));
  const auto group = make_local_group(options.ranks, x.window_bytes(options.ranks));
  std::vector<std::thread> others;
  for (int r = 1; r < options.ranks; ++r) {
    // Their failure is rank 0's too.
    others.emplace_back(
        [&, r] { (void)bench_exchange(group[static_cast<size_t>(r)], options).is_ok(); });
  }
  auto rows = bench_exchange(group[0], options);
  for (std::thread& t : others) t.join();
  return rows;
}

}  // namespace sortie::exchange
