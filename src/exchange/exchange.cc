#include "exchange/exchange.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

#include "base/check.h"
#include "exchange/agreement.h"
#include "exchange/lists.h"
#include "exchange/waiter.h"
#include "exchange/window.h"

namespace sortie::exchange {
namespace {

// Epochs of a new membership begin above all that were ever signalled in those before.
constexpr int kGenerationShift = 48;
constexpr int kPoisonByte = 0xff;  // a NaN in fp32, bf16 and e4m3

struct FreeDelete {
  void operator()(float* p) const { std::free(p); }
};

// Calls fn(begin, end) for each run of consecutive i in [0, n) for which `wanted` holds: a run of
// tokens is a run of slots, hence one put.
template <typename Wanted, typename Fn>
void for_runs(int64_t n, Wanted wanted, Fn fn) {
  int64_t begin = -1;
  for (int64_t i = 0; i < n; ++i) {
    if (wanted(i)) {
      if (begin < 0) begin = i;
    } else if (begin >= 0) {
      fn(begin, i);
      begin = -1;
    }
  }
  if (begin >= 0) fn(begin, n);
}

class ExchangeOver final : public Exchange {
 public:
  ExchangeOver(std::shared_ptr<Transport> transport, const Options& options)
      : transport_(std::move(transport)),
        options_(options),
        rank_(transport_->rank()),
        size_(transport_->size()),
        experts_per_rank_(options.experts / size_),
        layout_(options, size_),
        window_(transport_->window()),
        waiter_(transport_, layout_, options),
        lists_(size_, rank_, options.experts, options.topk, layout_.capacity) {
    CHECK(check_options(options, size_).is_ok(), check_options(options, size_).message());
    CHECK(transport_->window_bytes() >= layout_.bytes,
          fmt::format("a window of {} bytes for {}", transport_->window_bytes(), layout_.bytes));
    sources_.resize(static_cast<size_t>(size_));
    headers_.resize(static_cast<size_t>(size_));
    present_.resize(static_cast<size_t>(size_ * layout_.capacity));
    destinations_.resize(static_cast<size_t>(layout_.capacity));
    meta_.resize(static_cast<size_t>(layout_.meta_stride));
    // A group of one needs no second buffer: a slot's part is already at home.
    if (size_ > 1) {
      own_parts_.reset(static_cast<float*>(
          std::aligned_alloc(64, static_cast<size_t>(std::max<int64_t>(layout_.parts_bytes, 64)))));
      CHECK(own_parts_ != nullptr, "no memory for the exchange's parts");
    }
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const Options& options() const override { return options_; }
  void* parts_memory() override { return size_ > 1 ? own_parts_.get() : home_parts(); }
  void wake() override { waiter_.wake(); }
  void abort() override { waiter_.abort(); }
  uint64_t members() const override { return waiter_.members(); }
  Status settle() override;
  Result<Recovery> recover(const Status& failure) override;
  void leave(const Status& why) override;

  Result<ExpertRows> dispatch(const Dispatch& args) override;
  Result<CombinedParts> combine(int layer, const void* parts) override;
  Result<std::span<const StepHeader>> all_gather(const StepHeader& mine) override;
  Result<bool> wait_for_peers(Duration most) override {
    return waiter_.wait_any(kHeader, header_epoch_ + 1, most);
  }

 private:
  bool normal(const Dispatch& args) const {
    return options_.mode == Mode::kNormal || (options_.mode == Mode::kAuto && args.any_prefill);
  }
  float* home_parts() { return reinterpret_cast<float*>(window_ + layout_.parts_offset); }

  Status check(const Dispatch& args) const;
  Status come_together();
  void poison_rows();
  void poison_parts();
  void find_destinations(const Dispatch& args);
  void send_tokens(const Dispatch& args);
  Status read_sources(const Dispatch& args);

  const std::shared_ptr<Transport> transport_;
  const Options options_;
  const int rank_;
  const int size_;
  const int experts_per_rank_;
  const WindowLayout layout_;
  std::byte* const window_;
  Waiter waiter_;
  ListBuilder lists_;

  uint64_t epoch_ = 0;         // of dispatch and its combine
  uint64_t header_epoch_ = 0;  // of all_gather
  uint64_t completed_ = 0;     // header epoch of the last step that this rank has finished
  bool settling_ = false;      // and whose fate it does not know
  bool dispatched_ = false;    // a combine is due
  int64_t max_tokens_ = 0;     // slots a source in the last dispatch's mode
  ExpertRows rows_;
  std::vector<SourceTokens> sources_;   // by rank
  std::vector<StepHeader> headers_;     // by rank
  std::vector<uint64_t> destinations_;  // by own token: the ranks with an expert of it
  std::vector<uint8_t> present_;
  std::vector<std::byte> meta_;
  std::unique_ptr<float, FreeDelete> own_parts_;
};

Status ExchangeOver::check(const Dispatch& args) const {
  const bool is_normal = normal(args);
  const int64_t most = is_normal ? options_.max_normal_tokens : options_.max_dispatch_tokens;
  if (args.tokens < 0 || args.tokens > most) {
    return Status::invalid(fmt::format(
        "layer {}, dispatch: rank {} has {} tokens, more than M = {} of {} mode; raise {}",
        args.layer, rank_, args.tokens, most, is_normal ? "normal" : "low_latency",
        is_normal ? "--chunked-prefill-size" : "--max-dispatch-tokens"));
  }
  if (args.row_bytes < 1 || args.row_bytes > options_.widest_row_bytes) {
    return Status::internal(
        fmt::format("layer {}, dispatch: rows of {} bytes, and at most {} were announced",
                    args.layer, args.row_bytes, options_.widest_row_bytes));
  }
  if (size_ * layout_.row_stride(args.row_bytes) > std::numeric_limits<int32_t>::max()) {
    return Status::internal(fmt::format(
        "layer {}, dispatch: rows of {} bytes lie too far apart in a window made for {} bytes",
        args.layer, args.row_bytes, options_.widest_row_bytes));
  }
  return check_ids({args.ids, static_cast<size_t>(args.tokens * options_.topk)}, options_.topk,
                   options_.experts, rank_, args.layer);
}

void ExchangeOver::find_destinations(const Dispatch& args) {
  for (int r = 0; r < size_; ++r) {
    std::fill_n(present_.begin() + r * layout_.capacity, max_tokens_, uint8_t{0});
  }
  for (int64_t t = 0; t < args.tokens; ++t) {
    uint64_t ranks = 0;
    for (int k = 0; k < options_.topk; ++k) {
      const int32_t id = args.ids[t * options_.topk + k];
      if (id >= 0) ranks |= uint64_t{1} << (id / experts_per_rank_);
    }
    ranks &= waiter_.members();  // a lost expert's part is zero; the weights stay as they are
    destinations_[static_cast<size_t>(t)] = ranks;
    for (; ranks != 0; ranks &= ranks - 1) {
      present_[static_cast<size_t>(std::countr_zero(ranks) * layout_.capacity + t)] = 1;
    }
  }
}

void ExchangeOver::send_tokens(const Dispatch& args) {
  const DispatchMeta meta{.tokens = args.tokens,
                          .row_bytes = args.row_bytes,
                          .max_tokens = max_tokens_,
                          .layer = args.layer};
  const auto ids_bytes = static_cast<size_t>(args.tokens * options_.topk) * sizeof(int32_t);
  std::memcpy(meta_.data(), &meta, sizeof meta);
  if (ids_bytes != 0) {
    std::memcpy(meta_.data() + sizeof meta, args.ids, ids_bytes);
    std::memcpy(meta_.data() + sizeof meta + ids_bytes, args.weights, ids_bytes);
  }
  const auto meta_bytes = static_cast<int64_t>(sizeof meta + 2 * ids_bytes);
  const int64_t own_rows =
      layout_.rows_offset + rank_ * layout_.row_stride(args.row_bytes) * args.row_bytes;
  // Starting behind oneself, so that the ranks do not all write to rank 0 first.
  for (int i = 1; i <= size_; ++i) {
    const int peer = (rank_ + i) % size_;
    if (!waiter_.is_member(peer)) continue;
    if (peer == rank_) {
      std::memcpy(window_ + layout_.meta(rank_), meta_.data(), static_cast<size_t>(meta_bytes));
    } else {
      transport_->put(peer, layout_.meta(rank_), meta_.data(), meta_bytes);
    }
    for_runs(
        args.tokens,
        [&](int64_t t) { return (destinations_[static_cast<size_t>(t)] >> peer & 1) != 0; },
        [&](int64_t begin, int64_t end) {
          const std::byte* from = args.rows + begin * args.row_bytes;
          const int64_t to = own_rows + begin * args.row_bytes;
          const int64_t bytes = (end - begin) * args.row_bytes;
          if (peer == rank_) {
            std::memcpy(window_ + to, from, static_cast<size_t>(bytes));
          } else {
            transport_->put(peer, to, from, bytes);
          }
        });
    if (peer != rank_) transport_->signal(peer, kDispatched, epoch_);
  }
}

// The peers' words index memory here, so they are checked even though each has checked its own.
Status ExchangeOver::read_sources(const Dispatch& args) {
  for (int source = 0; source < size_; ++source) {
    if (!waiter_.is_member(source)) {  // whatever lies there, it may still be writing
      sources_[static_cast<size_t>(source)] = {};
      continue;
    }
    const std::byte* at = window_ + layout_.meta(source);
    DispatchMeta meta;
    std::memcpy(&meta, at, sizeof meta);
    if (meta.layer != args.layer || meta.row_bytes != args.row_bytes ||
        meta.max_tokens != max_tokens_ || meta.tokens < 0 || meta.tokens > max_tokens_) {
      return Status::internal(fmt::format(
          "layer {}, dispatch: rank {} is at layer {} with {} rows of {} bytes and room for {}, "
          "this rank has rows of {} bytes and room for {}; the ranks must run the same steps",
          args.layer, source, meta.layer, meta.tokens, meta.row_bytes, meta.max_tokens,
          args.row_bytes, max_tokens_));
    }
    const auto n = static_cast<size_t>(meta.tokens * options_.topk);
    const auto* ids = reinterpret_cast<const int32_t*>(at + sizeof meta);
    RETURN_IF_ERROR(check_ids({ids, n}, options_.topk, options_.experts, source, args.layer));
    sources_[static_cast<size_t>(source)] = {
        .tokens = meta.tokens,
        .ids = ids,
        .weights = reinterpret_cast<const float*>(at + sizeof meta + n * sizeof(int32_t))};
  }
  return Status::ok();
}

Result<ExpertRows> ExchangeOver::dispatch(const Dispatch& args) {
  const Place place{.layer = args.layer, .phase = Phase::kDispatch};
  RETURN_IF_ERROR(waiter_.ready(place));
  CHECK(!dispatched_, "a dispatch without the combine of the one before");
  if (Status s = check(args); !s.is_ok()) return waiter_.fail(std::move(s), place);

  ++epoch_;
  max_tokens_ = normal(args) ? options_.max_normal_tokens : options_.max_dispatch_tokens;
  find_destinations(args);
  if (options_.poison) poison_parts();
  send_tokens(args);
  RETURN_IF_ERROR(waiter_.wait_all(kDispatched, epoch_, place));
  if (Status s = read_sources(args); !s.is_ok()) return waiter_.fail(std::move(s), place);
  rows_ = {.ranks = size_,
           .rank = rank_,
           .experts = options_.experts,
           .local_experts = experts_per_rank_,
           .max_tokens = max_tokens_,
           .row_stride = layout_.row_stride(args.row_bytes),
           .rows = window_ + layout_.rows_offset,
           .row_bytes = args.row_bytes};
  lists_.build(sources_, rows_);
  dispatched_ = true;
  return rows_;
}

Result<CombinedParts> ExchangeOver::combine(int layer, const void* parts) {
  const Place place{.layer = layer, .phase = Phase::kCombine};
  RETURN_IF_ERROR(waiter_.ready(place));
  CHECK(dispatched_, "a combine without a dispatch");
  dispatched_ = false;

  const int64_t hidden = options_.hidden;
  const auto row_bytes = hidden * static_cast<int64_t>(sizeof(float));
  if (options_.poison) poison_rows();
  for (int i = 1; i <= size_; ++i) {
    const int home = (rank_ + i) % size_;
    if (!waiter_.is_member(home)) continue;
    // A part goes home if any of this rank's experts had the token, as the lists say.
    const int32_t* offsets = rows_.slot_offsets + home * max_tokens_;
    for_runs(
        max_tokens_, [&](int64_t t) { return offsets[t + 1] > offsets[t]; },
        [&](int64_t begin, int64_t end) {
          const float* from =
              static_cast<const float*>(parts) + (home * max_tokens_ + begin) * hidden;
          const int64_t to = (rank_ * layout_.capacity + begin) * row_bytes;
          const int64_t bytes = (end - begin) * row_bytes;
          if (home != rank_) {
            transport_->put(home, layout_.parts_offset + to, from, bytes);
          } else if (float* at = home_parts() + to / static_cast<int64_t>(sizeof(float));
                     at != from) {
            std::memcpy(at, from, static_cast<size_t>(bytes));
          }
        });
    if (home != rank_) transport_->signal(home, kCombined, epoch_);
  }
  RETURN_IF_ERROR(waiter_.wait_all(kCombined, epoch_, place));
  return CombinedParts{.ranks = size_,
                       .max_tokens = layout_.capacity,
                       .rows = window_ + layout_.parts_offset,
                       .present = present_.data()};
}

Result<std::span<const StepHeader>> ExchangeOver::all_gather(const StepHeader& mine) {
  const Place place{.phase = Phase::kHeader};
  RETURN_IF_ERROR(waiter_.ready(place));
  ++header_epoch_;
  const int64_t own = layout_.header(header_epoch_, rank_);
  std::memcpy(window_ + own, &mine, sizeof mine);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || !waiter_.is_member(peer)) continue;
    transport_->put(peer, own, &mine, sizeof mine);
    transport_->signal(peer, kHeader, header_epoch_);
  }
  RETURN_IF_ERROR(waiter_.wait_all(kHeader, header_epoch_, place));
  for (int r = 0; r < size_; ++r) {
    StepHeader& header = headers_[static_cast<size_t>(r)];
    header = {};
    if (waiter_.is_member(r)) {
      std::memcpy(&header, window_ + layout_.header(header_epoch_, r), sizeof header);
    }
  }
  return std::span<const StepHeader>(headers_);
}

Status ExchangeOver::settle() {
  if (options_.on_loss == OnLoss::kFail) return Status::ok();
  const Place place{.phase = Phase::kSettle};
  RETURN_IF_ERROR(waiter_.ready(place));
  completed_ = header_epoch_;
  settling_ = true;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || !waiter_.is_member(peer)) continue;
    transport_->signal(peer, kSettled, header_epoch_);
  }
  RETURN_IF_ERROR(waiter_.wait_all(kSettled, header_epoch_, place));
  settling_ = false;
  return Status::ok();
}

Result<Recovery> ExchangeOver::recover(const Status& failure) {
  if (!waiter_.failure().may_go_on) return failure;
  Recovery recovery;
  Status together;
  do {  // another rank may be lost before all have come together
    const uint64_t before = waiter_.members();
    ASSIGN_OR_RETURN(const Decision decision,
                     agree(*transport_, layout_, options_, waiter_, completed_));
    recovery.step_stands |= settling_ && decision.completed >= completed_;
    for (uint64_t lost = before & ~decision.members; lost != 0; lost &= lost - 1) {
      const int rank = std::countr_zero(lost);
      recovery.lost.push_back({rank, sentence(decision.notes[rank])});
    }
    epoch_ = header_epoch_ = completed_ = decision.generation << kGenerationShift;
    settling_ = false;
    dispatched_ = false;
    together = come_together();
  } while (!together && waiter_.failure().may_go_on);
  RETURN_IF_ERROR(together);
  return recovery;
}

// Two rounds of signals. After the second each member has this rank's first, and so all that this
// rank sent in the void step: between hosts, writes to one place may otherwise arrive in any order.
Status ExchangeOver::come_together() {
  for (int round = 0; round < 2; ++round) {
    ++header_epoch_;
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_ || !waiter_.is_member(peer)) continue;
      transport_->signal(peer, kSettled, header_epoch_);
    }
    RETURN_IF_ERROR(waiter_.wait_all(kSettled, header_epoch_, {.phase = Phase::kAgree}));
  }
  completed_ = header_epoch_;
  return Status::ok();
}

void ExchangeOver::leave(const Status& why) {
  if (why.is_ok()) {
    waiter_.leave();
  } else if (waiter_.failure().status.is_ok()) {  // otherwise the others know already
    (void)waiter_.fail(why, {.phase = Phase::kHeader});
  }
}

// Only where members write: what a lost rank does to its places is nobody's business.
void ExchangeOver::poison_rows() {
  for (int source = 0; source < size_; ++source) {
    if (!waiter_.is_member(source)) continue;
    std::memset(window_ + layout_.meta(source), kPoisonByte,
                static_cast<size_t>(layout_.meta_stride));
    std::memset(window_ + layout_.rows_offset + source * rows_.row_stride * rows_.row_bytes,
                kPoisonByte, static_cast<size_t>(layout_.capacity * rows_.row_bytes));
  }
}

void ExchangeOver::poison_parts() {
  const auto bytes = static_cast<size_t>(layout_.capacity * options_.hidden) * sizeof(float);
  for (int source = 0; source < size_; ++source) {
    if (!waiter_.is_member(source)) continue;
    std::memset(window_ + layout_.parts_offset + static_cast<size_t>(source) * bytes, kPoisonByte,
                bytes);
  }
  std::memset(parts_memory(), kPoisonByte, static_cast<size_t>(layout_.parts_bytes));
}

}  // namespace

const Loss* loss_of(const std::vector<Loss>& losses, int rank) {
  const auto it =
      std::find_if(losses.begin(), losses.end(), [rank](const Loss& l) { return l.rank == rank; });
  return it == losses.end() ? nullptr : &*it;
}

std::unique_ptr<Exchange> make_exchange(std::shared_ptr<Transport> transport,
                                        const Options& options) {
  return std::make_unique<ExchangeOver>(std::move(transport), options);
}

}  // namespace sortie::exchange
