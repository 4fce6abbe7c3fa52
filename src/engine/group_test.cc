#include "engine/group.h"

#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <thread>

namespace sortie::engine {
namespace {

// A rank that does what the test says.
class FakeLink final : public RankLink {
 public:
  void start(LinkEvents to) override { events = std::move(to); }
  void submit(Request request) override { submitted.push_back(std::move(request)); }
  void cancel(uint64_t request) override { cancelled.push_back(request); }
  void stop() override { stopped = true; }
  void lose(const Status& why) override { status = why; }
  Status join() override { return status; }
  RankStats stats() const override { return {.steps = 7}; }

  LinkEvents events;
  std::vector<Request> submitted;
  std::vector<uint64_t> cancelled;
  bool stopped = false;
  Status status;
};

struct Group {
  explicit Group(size_t ranks, bool degrade = false) {
    std::vector<std::unique_ptr<RankLink>> list;
    for (size_t i = 0; i < ranks; ++i) {
      auto link = std::make_unique<FakeLink>();
      links.push_back(link.get());
      list.push_back(std::move(link));
    }
    engine = std::make_unique<Engine>(std::move(list), degrade);
    engine->start();
  }
  uint64_t submit(int rank = -1) {
    return engine->submit({.prompt = {1}, .rank = rank},
                          [this](const Event& e) { events[e.request].push_back(e); });
  }
  std::vector<FakeLink*> links;
  std::map<uint64_t, std::vector<Event>> events;
  std::unique_ptr<Engine> engine;
};

TEST(Engine, GivesARequestToTheLeastLoadedRank) {
  Group g(3);
  g.submit();
  g.submit();
  g.submit();
  g.submit();  // rank 0 again
  g.submit(2);
  ASSERT_EQ(g.links[0]->submitted.size(), 2u);
  ASSERT_EQ(g.links[1]->submitted.size(), 1u);
  ASSERT_EQ(g.links[2]->submitted.size(), 2u);
  const uint64_t last = g.links[0]->submitted[1].id;
  g.links[0]->events.event({.request = g.links[0]->submitted[0].id, .finish = FinishReason::kStop});
  g.links[0]->events.event({.request = last, .finish = FinishReason::kStop});
  g.submit();  // now rank 0 has none
  EXPECT_EQ(g.links[0]->submitted.size(), 3u);
}

TEST(Engine, DeliversInOrderAndNothingAfterTheLast) {
  Group g(1);
  const uint64_t id = g.submit();
  for (int32_t token = 0; token < 3; ++token)
    g.links[0]->events.event({.request = id, .token = token});
  g.links[0]->events.event({.request = id, .finish = FinishReason::kLength});
  g.links[0]->events.event({.request = id, .token = 9});
  g.links[0]->events.event({.request = id, .finish = FinishReason::kStop});
  ASSERT_EQ(g.events[id].size(), 4u);
  EXPECT_EQ(g.events[id][2].token, 2);
  EXPECT_EQ(g.events[id][3].finish, FinishReason::kLength);
}

TEST(Engine, IgnoresARankThatSpeaksOfAnothersRequest) {
  Group g(2);
  const uint64_t id = g.submit(0);
  g.links[1]->events.event({.request = id, .finish = FinishReason::kStop});
  EXPECT_TRUE(g.events[id].empty());
}

TEST(Engine, CancelGoesToTheRankThatServes) {
  Group g(2);
  const uint64_t id = g.submit(1);
  g.engine->cancel(id);
  g.engine->cancel(id + 1);
  EXPECT_TRUE(g.links[0]->cancelled.empty());
  EXPECT_EQ(g.links[1]->cancelled, (std::vector<uint64_t>{id}));
}

TEST(Engine, ALostRankEndsItsRequestsAndNoOthers) {
  Group g(2);
  const uint64_t a = g.submit(0);
  const uint64_t b = g.submit(1);
  const uint64_t c = g.submit(1);
  g.links[1]->events.lost(Status::rank_lost("rank 1 is gone"));
  EXPECT_TRUE(g.events[a].empty());
  for (const uint64_t id : {b, c}) {
    ASSERT_EQ(g.events[id].size(), 1u);
    EXPECT_EQ(g.events[id][0].finish, FinishReason::kRankLost);
    EXPECT_EQ(g.events[id][0].error, "rank 1 is gone");
  }
}

TEST(Engine, RefusesARankThatIsNotThere) {
  Group g(2);
  const uint64_t id = g.submit(2);
  ASSERT_EQ(g.events[id].size(), 1u);
  EXPECT_EQ(g.events[id][0].finish, FinishReason::kError);
  EXPECT_EQ(g.events[id][0].error, "the request asks for rank 2, but the last rank is 1");
}

TEST(Engine, WithDegradeTheOthersGoOn) {
  Group g(3, true);
  const uint64_t a = g.submit(0);
  const uint64_t b = g.submit(1);
  g.links[1]->events.lost(Status::rank_lost("rank 1 closed its connection"));
  EXPECT_TRUE(g.events[b].empty()) << "rank 0 will say more";
  g.links[0]->events.peer_lost({1, "rank 1 was lost in layer 2, dispatch: its process has ended"});
  g.links[2]->events.peer_lost({1, "rank 1 was lost, says rank 2"});
  ASSERT_EQ(g.events[b].size(), 1u);
  EXPECT_EQ(g.events[b][0].finish, FinishReason::kRankLost);
  EXPECT_EQ(
      g.events[b][0].error,
      "rank 1 was lost in layer 2, dispatch: its process has ended; the group goes on without "
      "it, so ask again");
  EXPECT_TRUE(g.events[a].empty());
  const uint64_t c = g.submit(1);
  ASSERT_EQ(g.events[c].size(), 1u);
  EXPECT_EQ(g.events[c][0].error, g.events[b][0].error);
  g.submit();
  g.submit();
  EXPECT_EQ(g.links[1]->submitted.size(), 1u);
  EXPECT_EQ(g.links[2]->submitted.size(), 1u);
  g.engine->stop();
  EXPECT_TRUE(g.engine->join().is_ok());
  ASSERT_EQ(g.engine->losses().size(), 1u);
}

TEST(Engine, WithDegradeAGoneRankEndsWithRankZeroAtTheLatest) {
  Group g(2, true);
  const uint64_t b = g.submit(1);
  g.links[1]->events.event({.request = b, .token = 5, .degraded = true});
  g.links[1]->events.lost(Status::rank_lost("rank 1 closed its connection"));
  g.links[0]->events.lost(Status::invalid("rank 0 failed"));
  ASSERT_EQ(g.events[b].size(), 2u);
  EXPECT_EQ(g.events[b][1].error, "rank 1 closed its connection");
  EXPECT_TRUE(g.events[b][1].degraded) << "its tokens were";
}

TEST(Engine, JoinReportsTheFirstFailure) {
  Group g(3);
  g.links[1]->status = Status::rank_lost("first");
  g.links[2]->status = Status::rank_lost("second");
  g.engine->stop();
  EXPECT_TRUE(g.links[2]->stopped);
  EXPECT_EQ(g.engine->join().message(), "first");
  EXPECT_EQ(g.engine->stats().size(), 3u);
}

// A RemoteLink under an Engine, with its frames in hand.
struct Remote {
  explicit Remote(Duration leave_timeout = seconds(30)) {
    auto owned = std::make_unique<RemoteLink>(
        "rank 1",
        [this](std::span<const std::byte> frame) {
          Result<Message> message = decode(frame);
          ASSERT_TRUE(message.is_ok());
          sent.push_back(std::move(*message));
        },
        leave_timeout);
    link = owned.get();
    std::vector<std::unique_ptr<RankLink>> list;
    list.push_back(std::move(owned));
    engine = std::make_unique<Engine>(std::move(list));
    engine->start();
  }
  uint64_t submit() {
    return engine->submit({.prompt = {1, 2}},
                          [this](const Event& e) { events[e.request].push_back(e); });
  }
  std::vector<Message> sent;
  std::map<uint64_t, std::vector<Event>> events;
  RemoteLink* link = nullptr;
  std::unique_ptr<Engine> engine;
};

TEST(RemoteLink, CarriesRequestsOutAndEventsBack) {
  Remote r;
  const uint64_t id = r.submit();
  r.engine->cancel(id);
  ASSERT_EQ(r.sent.size(), 2u);
  EXPECT_EQ(std::get<Request>(r.sent[0]).id, id);
  EXPECT_EQ(std::get<Request>(r.sent[0]).prompt, (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(std::get<CancelMessage>(r.sent[1]).request, id);
  EXPECT_TRUE(r.link->on_frame(encode(Event{.request = id, .token = 5})).is_ok());
  EXPECT_TRUE(r.link->on_frame(encode(RankStats{.steps = 3})).is_ok());
  EXPECT_TRUE(
      r.link->on_frame(encode(Event{.request = id, .finish = FinishReason::kCancelled})).is_ok());
  ASSERT_EQ(r.events[id].size(), 2u);
  EXPECT_EQ(r.events[id][0].token, 5);
  EXPECT_EQ(r.engine->stats()[0].steps, 3);
  r.engine->stop();
  r.engine->stop();
  EXPECT_EQ(r.sent.size(), 3u) << "one stop is enough";
  EXPECT_TRUE(r.link->on_frame(encode(LeftMessage{})).is_ok());
  r.link->on_closed();  // after the rank has left, that is no news
  EXPECT_TRUE(r.engine->join().is_ok());
}

TEST(RemoteLink, AClosedConnectionIsALostRank) {
  Remote r;
  const uint64_t before = r.submit();
  r.link->on_closed();
  const uint64_t after = r.submit();
  for (const uint64_t id : {before, after}) {
    ASSERT_EQ(r.events[id].size(), 1u);
    EXPECT_EQ(r.events[id][0].finish, FinishReason::kRankLost);
    EXPECT_EQ(r.events[id][0].error,
              "rank 1 closed its control connection before it left the group");
  }
  EXPECT_EQ(r.engine->join().code(), StatusCode::kRankLost);
}

TEST(RemoteLink, ARankThatLeftEndsWhatItNeverSaw) {
  Remote r;
  const uint64_t id = r.submit();
  EXPECT_TRUE(r.link->on_frame(encode(LeftMessage{Status::rank_lost("rank 0 is gone")})).is_ok());
  ASSERT_EQ(r.events[id].size(), 1u);
  EXPECT_EQ(r.events[id][0].error, "rank 0 is gone");
}

TEST(RemoteLink, HostileFramesAreALostRank) {
  const std::vector<std::vector<std::byte>> frames = {
      {}, std::vector<std::byte>(100, std::byte{0xff}), encode(Request{}), encode(StopMessage{})};
  for (const auto& frame : frames) {
    Remote r;
    const uint64_t id = r.submit();
    EXPECT_FALSE(r.link->on_frame(frame).is_ok());
    ASSERT_EQ(r.events[id].size(), 1u);
    EXPECT_EQ(r.events[id][0].finish, FinishReason::kRankLost);
    EXPECT_EQ(r.engine->join().code(), StatusCode::kRankLost);
  }
}

TEST(RemoteLink, JoinGivesUpOnARankThatDoesNotLeave) {
  Remote r(std::chrono::milliseconds(20));
  const uint64_t id = r.submit();
  r.engine->stop();
  EXPECT_EQ(r.engine->join().code(), StatusCode::kRankLost);
  ASSERT_EQ(r.events[id].size(), 1u);
  EXPECT_EQ(r.events[id][0].finish, FinishReason::kRankLost);
}

}  // namespace
}  // namespace sortie::engine
