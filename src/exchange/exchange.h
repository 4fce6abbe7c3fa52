#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/exchange_layout.h"
#include "base/status.h"
#include "exchange/transport.h"

// Expert-parallel dispatch and combine with DeepEP's low-latency semantics (docs/exchange.md).
namespace sortie::exchange {

enum class Mode : uint8_t { kLowLatency, kNormal, kAuto };

// What the ranks do when one of them is lost (docs/exchange.md, "Loss").
enum class OnLoss : uint8_t { kFail, kDegrade };

constexpr int kMaxRanks = 64;  // a token's destinations are a 64-bit mask

struct Options {
  int experts = 0;  // of a layer; a multiple of the group's size
  int topk = 0;     // K
  int64_t hidden = 0;
  int64_t widest_row_bytes = 0;     // of the widest dispatch row among all layers' wire formats
  int64_t max_dispatch_tokens = 0;  // M: tokens a rank may dispatch in low_latency
  int64_t max_normal_tokens = 0;    // the same for normal: prefill chunk rows + decode rows a rank
  Mode mode = Mode::kAuto;
  OnLoss on_loss = OnLoss::kFail;
  Duration exchange_timeout = seconds(10);  // from a peer's last sign of life
  Duration step_timeout = seconds(300);     // alive but stuck
  // May a wait spin (20 us) before it sleeps? Only where every thread of every rank has a core.
  bool spin = false;
  // Tests: overwrite with NaN bytes whatever nobody may read any more, at each dispatch and
  // combine.
  bool poison = false;
  // Bytes of window that one rank needs for these options.
  int64_t window_bytes(int ranks) const;
  // And of the parts that it collects beside it.
  int64_t parts_bytes(int ranks) const;
};

// Refuses sizes that the exchange cannot serve, in the words of the flags. To be called before
// make_exchange, which insists.
Status check_options(const Options& options, int ranks);

// One MoE layer's tokens on their way out.
struct Dispatch {
  int layer = 0;                    // named in errors
  bool any_prefill = false;         // auto: normal if true, low_latency else; the same on all ranks
  const std::byte* rows = nullptr;  // [tokens] x row_bytes, quantised once, by the sender
  int64_t row_bytes = 0;
  int64_t tokens = 0;              // may be 0
  const int32_t* ids = nullptr;    // [tokens, K]; -1 = none
  const float* weights = nullptr;  // [tokens, K]
};

// The header that ranks exchange before a step (docs/engine.md). 64 bytes.
struct alignas(64) StepHeader {
  uint64_t epoch = 0;
  int32_t prefill_rows = 0;
  int32_t decode_rows = 0;
  int32_t draft_steps = 0;
  int32_t flags = 0;  // bit 0: this rank wants the group to stop
};

// A rank that the group goes on without, and the sentence that names it, the layer and the phase.
struct Loss {
  int rank = -1;
  std::string sentence;
};
// Null if the rank is not among them.
const Loss* loss_of(const std::vector<Loss>& losses, int rank);

// What the survivors have agreed on.
struct Recovery {
  // This rank was in settle() when the loss was found, and every survivor had come as far: the step
  // stands. False: the step that failed is void, or none was under way.
  bool step_stands = false;
  std::vector<Loss> lost;  // since the last agreement
};

// One rank's end of the exchange. Calls are made in the same order on every rank, also by ranks
// with no tokens. Errors are final: kRankLost names the rank, layer and phase. Only with kDegrade
// may a rank go on after one, if recover() says so.
class Exchange {
 public:
  virtual ~Exchange() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const Options& options() const = 0;

  // Returns the rows that arrived for this rank's experts. Rows and lists are valid until this
  // rank's combine returns: its signal is what lets the others send the next rows.
  // Errors: T > M, an id outside -1..E-1, a lost rank.
  virtual Result<ExpertRows> dispatch(const Dispatch& args) = 0;
  // parts [slots, hidden] as moe_reduce left them, for the ExpertRows of the last dispatch; returns
  // what the experts' ranks made of this rank's own tokens, valid until the next dispatch.
  virtual Result<CombinedParts> combine(int layer, const void* parts) = 0;

  // Where combine's parts are best written (saves a copy), [slots, hidden] of the activations'
  // type: fp32 between CPUs, bf16 between GPUs.
  virtual void* parts_memory() = 0;
  template <typename T = float>
  T* parts_buffer() {
    return static_cast<T*>(parts_memory());
  }

  // All ranks' headers, by rank; valid until the next call.
  virtual Result<std::span<const StepHeader>> all_gather(const StepHeader& mine) = 0;
  // For a rank with nothing to do: sleeps until a peer has sent the header of the next step (true),
  // or wake() was called or `most` has passed (false).
  virtual Result<bool> wait_for_peers(Duration most) = 0;
  virtual void wake() = 0;  // from any thread: ends this rank's wait_for_peers

  // The ranks of the group as bits: all but those that were lost.
  virtual uint64_t members() const {
    return size() == 64 ? ~uint64_t{0} : (uint64_t{1} << size()) - 1;
  }
  // kDegrade: ends a step. ok: every member has finished it, so its results may be published.
  // kFail: does nothing, for nothing goes on after a loss.
  virtual Status settle() { return Status::ok(); }
  // After a call failed with `failure`: agrees with the survivors on who is left. An error: this
  // rank cannot go on (always so with kFail; this rank is out of the group; rank 0 is lost).
  virtual Result<Recovery> recover(const Status& failure) { return failure; }
  // This rank's last call: it takes no further part. `why` is ok after a stop that all know of.
  virtual void leave(const Status& why) { (void)why; }

  // Stops waiting for ever: every wait in progress and to come returns kCancelled. Any thread.
  virtual void abort() = 0;
};

std::unique_ptr<Exchange> make_exchange(std::shared_ptr<Transport> transport,
                                        const Options& options);

}  // namespace sortie::exchange
