#include "exchange/window.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <limits>

#include "exchange/agreement.h"

namespace sortie::exchange {
namespace {
int64_t align64(int64_t n) { return (n + 63) / 64 * 64; }
}  // namespace

WindowLayout::WindowLayout(const Options& o, int ranks)
    : ranks(ranks),
      capacity(std::max(o.mode == Mode::kNormal ? 0 : o.max_dispatch_tokens,
                        o.mode == Mode::kLowLatency ? 0 : o.max_normal_tokens)) {
  const int64_t per_id = sizeof(int32_t) + sizeof(float);
  meta_offset = 2 * ranks * static_cast<int64_t>(sizeof(StepHeader));
  meta_stride = align64(static_cast<int64_t>(sizeof(DispatchMeta)) + capacity * o.topk * per_id);
  rows_offset = meta_offset + ranks * meta_stride;
  source_bytes = (capacity + ranks) * o.widest_row_bytes;
  rows_bytes = align64(ranks * source_bytes);
  parts_offset = rows_offset + rows_bytes;
  parts_bytes = align64(ranks * capacity * o.hidden * static_cast<int64_t>(sizeof(float)));
  reports_offset = parts_offset + parts_bytes;
  report_stride = align64(sizeof(Report));
  decisions_offset = reports_offset + ranks * report_stride;
  decision_stride = align64(sizeof(Decision));
  bytes = decisions_offset + 2 * decision_stride;
}

int64_t Options::window_bytes(int ranks) const { return WindowLayout(*this, ranks).bytes; }
int64_t Options::parts_bytes(int ranks) const {
  return ranks > 1 ? WindowLayout(*this, ranks).parts_bytes : 0;
}

Status check_options(const Options& o, int ranks) {
  if (ranks < 1 || ranks > kMaxRanks || !std::has_single_bit(static_cast<unsigned>(ranks))) {
    return Status::usage(fmt::format(
        "--ep-size {} is not supported: use a power of two from 1 to {}", ranks, kMaxRanks));
  }
  if (o.experts < 1 || o.experts % ranks != 0) {
    return Status::usage(
        fmt::format("--ep-size {} does not divide the model's {} experts; use a size that does",
                    ranks, o.experts));
  }
  if (o.topk < 1 || o.hidden < 1 || o.widest_row_bytes < 1) {
    return Status::internal(
        fmt::format("exchange of top-{} rows of {} values and {} bytes makes no sense", o.topk,
                    o.hidden, o.widest_row_bytes));
  }
  if (o.mode != Mode::kNormal && o.max_dispatch_tokens < 1) {
    return Status::usage(
        fmt::format("--max-dispatch-tokens {} must be at least 1", o.max_dispatch_tokens));
  }
  if (o.mode != Mode::kLowLatency && o.max_normal_tokens < 1) {
    return Status::usage(fmt::format(
        "normal mode needs room for at least 1 row a rank and has {}; raise --chunked-prefill-size",
        o.max_normal_tokens));
  }
  // Entries and slots are int32 (base/exchange_layout.h).
  const int64_t most = std::numeric_limits<int32_t>::max();
  if (std::max(o.max_dispatch_tokens, o.max_normal_tokens) > most / ranks / o.topk) {
    return Status::usage(
        fmt::format("{} rows a rank are too many for {} ranks; lower --max-dispatch-tokens or "
                    "--chunked-prefill-size",
                    std::max(o.max_dispatch_tokens, o.max_normal_tokens), ranks));
  }
  return Status::ok();
}

}  // namespace sortie::exchange
