#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_set>

#include "base/clock.h"
#include "base/status.h"
#include "engine/engine.h"
#include "engine/request.h"
#include "engine/wire.h"

namespace sortie::engine {

// Where a link delivers. Calls that concern one request never overlap.
struct LinkEvents {
  std::function<void(const Event&)> event;
  // Nothing more will come: whatever is in flight on this rank ends with this status.
  std::function<void(const Status&)> lost;
  // The ranks go on without another one; may be said more than once.
  std::function<void(const exchange::Loss&)> peer_lost;
};

// The front's hold of one rank, wherever that runs. Members may be called from any thread, start
// and join by one owner.
class RankLink {
 public:
  virtual ~RankLink() = default;
  virtual void start(LinkEvents to) = 0;
  // The request ends through LinkEvents in any case.
  virtual void submit(Request request) = 0;
  virtual void cancel(uint64_t request) = 0;
  virtual void stop() = 0;
  // The others go on without this rank: join need not wait for what it cannot say any more.
  virtual void lose(const Status& why) = 0;
  virtual Status join() = 0;
  virtual RankStats stats() const = 0;
};

// A rank that is a thread of this process.
class LocalLink final : public RankLink {
 public:
  LocalLink(model::Model& model, EngineOptions options) : model_(model), options_(options) {}
  void start(LinkEvents to) override;
  void submit(Request request) override { engine_->submit(std::move(request)); }
  void cancel(uint64_t request) override { engine_->cancel(request); }
  void stop() override { engine_->stop(); }
  void lose(const Status& /*why*/) override {}  // its loop finds out itself
  Status join() override { return engine_->join(); }
  RankStats stats() const override { return engine_->stats(); }

 private:
  model::Model& model_;
  const EngineOptions options_;
  std::unique_ptr<RankEngine> engine_;
};

// Sends one frame to the other side, or drops it if the connection is gone (its reader will say
// so). Any thread.
using SendFrame = std::function<void(std::span<const std::byte>)>;

// A rank of another process, behind a connection that carries frames. The connection's reader, one
// thread, calls on_frame and on_closed.
class RemoteLink final : public RankLink {
 public:
  // `name` is for errors ("rank 3"). After stop() the rank has `leave_timeout` to say that it left.
  RemoteLink(std::string name, SendFrame send, Duration leave_timeout = seconds(30));

  // An error means that the connection is of no more use.
  Status on_frame(std::span<const std::byte> frame);
  void on_closed();

  void start(LinkEvents to) override;  // before the first frame
  void submit(Request request) override;
  void cancel(uint64_t request) override;
  void stop() override;
  void lose(const Status& why) override { leave(why); }
  Status join() override;
  RankStats stats() const override;

 private:
  void leave(const Status& status);

  const std::string name_;
  const SendFrame send_;
  const Duration leave_timeout_;
  LinkEvents to_;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::optional<TimePoint> leave_by_;
  std::optional<Status> left_;
  RankStats stats_;
};

// The other end of a RemoteLink: drives the rank of this process as the front's frames say.
class RemoteRank {
 public:
  RemoteRank(model::Model& model, EngineOptions options, SendFrame send);

  void start() { engine_.start(); }
  // Called by the connection's reader. An error means that the connection is of no more use.
  Status on_frame(std::span<const std::byte> frame);
  // The front is gone: nobody reads the answers, so the group stops.
  void on_closed() { engine_.stop(); }
  // Waits for the loop and tells the front how it ended.
  Status join();

 private:
  void on_event(const Event& event);

  const SendFrame send_;
  std::mutex mutex_;
  std::unordered_set<uint64_t> in_flight_;  // guarded by mutex_
  RankEngine engine_;                       // last: its thread uses the rest
};

}  // namespace sortie::engine
