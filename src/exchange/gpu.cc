#include "exchange/gpu.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <new>
#include <vector>

#include "base/check.h"
#include "exchange/gpu_lists.h"

namespace sortie::exchange {

namespace {

class GpuExchange final : public Exchange {
 public:
  GpuExchange(const Options& options, void* stream)
      : options_(options),
        stream_(stream),
        most_(std::max({options.max_dispatch_tokens, options.max_normal_tokens, int64_t{1}})) {
    const int64_t entries = most_ * options.topk;
    const auto take = [this](auto*& p, int64_t count) {
      const auto bytes = static_cast<size_t>(count) * sizeof *p;
      void* memory = nullptr;
      if (cudaMalloc(&memory, std::max<size_t>(bytes, 1)) != cudaSuccess) throw std::bad_alloc();
      owned_.emplace_back(memory);
      p = static_cast<std::remove_reference_t<decltype(p)>>(memory);
    };
    take(lists_.offsets, options.experts + 1);
    take(lists_.row_index, entries);
    take(lists_.row_weight, entries);
    take(lists_.slot_offsets, most_ + 1);
    take(lists_.slot_entries, entries);
    take(lists_.present, most_);
    take(parts_, most_ * options.hidden * 2);
  }

  int rank() const override { return 0; }
  int size() const override { return 1; }
  const Options& options() const override { return options_; }

  Result<ExpertRows> dispatch(const Dispatch& args) override {
    if (args.tokens < 0 || args.tokens > most_) {
      return Status::invalid(fmt::format(
          "layer {}, dispatch: {} tokens, more than M = {}; raise --chunked-prefill-size",
          args.layer, args.tokens, most_));
    }
    tokens_ = args.tokens;
    ListArgs a = lists_;
    a.ids = args.ids;
    a.weights = args.weights;
    a.tokens = static_cast<int>(tokens_);
    a.topk = options_.topk;
    a.experts = options_.experts;
    if (const char* error = enqueue_lists(a, stream_); error != nullptr) {
      return Status::internal(
          fmt::format("layer {}, dispatch: the GPU failed: {}", args.layer, error));
    }
    return ExpertRows{.ranks = 1,
                      .rank = 0,
                      .experts = options_.experts,
                      .local_experts = options_.experts,
                      .max_tokens = tokens_,
                      .rows = args.rows,
                      .row_bytes = args.row_bytes,
                      .entries = tokens_ * options_.topk,
                      .offsets = lists_.offsets,
                      .row_index = lists_.row_index,
                      .row_weight = lists_.row_weight,
                      .slots = tokens_,
                      .slot_offsets = lists_.slot_offsets,
                      .slot_entries = lists_.slot_entries};
  }

  Result<CombinedParts> combine(int /*layer*/, const void* parts) override {
    return CombinedParts{.ranks = 1,
                         .max_tokens = tokens_,
                         .rows = static_cast<const std::byte*>(parts),
                         .present = lists_.present};
  }

  void* parts_memory() override { return parts_; }

  Result<std::span<const StepHeader>> all_gather(const StepHeader& mine) override {
    header_ = mine;
    return std::span<const StepHeader>(&header_, 1);
  }

  Result<bool> wait_for_peers(Duration most) override {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, most, [this] { return woken_ || aborted_; });
    woken_ = false;
    if (aborted_) return Status::cancelled("the exchange was asked to stop");
    return false;
  }

  void wake() override {
    const std::lock_guard lock(mutex_);
    woken_ = true;
    changed_.notify_all();
  }

  void abort() override {
    const std::lock_guard lock(mutex_);
    aborted_ = true;
    changed_.notify_all();
  }

 private:
  struct Free {
    void operator()(void* p) const { cudaFree(p); }
  };

  const Options options_;
  void* const stream_;
  const int64_t most_;
  std::vector<std::unique_ptr<void, Free>> owned_;
  ListArgs lists_{};
  std::byte* parts_ = nullptr;
  int64_t tokens_ = 0;
  StepHeader header_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool woken_ = false;
  bool aborted_ = false;
};

}  // namespace

std::unique_ptr<Exchange> make_gpu_exchange(const Options& options, void* stream) {
  return std::make_unique<GpuExchange>(options, stream);
}

}  // namespace sortie::exchange
