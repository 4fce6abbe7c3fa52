#include "exchange/local.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "exchange/conformance.h"
#include "exchange/exchange.h"

namespace sortie::exchange {
namespace {

struct Ranks {
  explicit Ranks(int n, const Options& options)
      : group(make_local_group_with_faults(n, options.window_bytes(n))) {
    for (auto& t : group.transports) ends.push_back(make_exchange(t, options));
  }
  // Runs body(exchange) on one thread a rank.
  void run(const std::function<void(Exchange&)>& body) {
    std::vector<std::thread> threads;
    threads.reserve(ends.size());
    for (auto& e : ends) threads.emplace_back([&body, &e] { body(*e); });
    for (auto& t : threads) t.join();
  }
  std::vector<std::string> conform_all(uint64_t seed, int steps) {
    std::vector<std::string> results(ends.size());
    run([&](Exchange& e) { results[static_cast<size_t>(e.rank())] = conform(e, seed, steps); });
    return results;
  }

  LocalGroup group;
  std::vector<std::unique_ptr<Exchange>> ends;
};

class LocalConformance : public testing::TestWithParam<std::tuple<int, Mode>> {};

TEST_P(LocalConformance, ManySteps) {
  const auto [n, mode] = GetParam();
  Ranks ranks(n, conformance_options(n, mode));
  for (const std::string& error : ranks.conform_all(17, n >= 8 ? 40 : 200)) EXPECT_EQ(error, "");
}

INSTANTIATE_TEST_SUITE_P(Sizes, LocalConformance,
                         testing::Combine(testing::Values(1, 2, 4, 8),
                                          testing::Values(Mode::kLowLatency, Mode::kNormal,
                                                          Mode::kAuto)));

TEST(Local, ThousandsOfEpochs) {
  Ranks ranks(2, conformance_options(2, Mode::kAuto));
  for (const std::string& error : ranks.conform_all(5, 4000)) EXPECT_EQ(error, "");
}

Options with_timeouts(int ranks, double exchange, double step) {
  Options o = conformance_options(ranks, Mode::kAuto);
  o.exchange_timeout = seconds(exchange);
  o.step_timeout = seconds(step);
  return o;
}

// One layer in which each rank's token 0 goes to expert 0 and to the last expert.
struct OneToken {
  explicit OneToken(Exchange& e)
      : e(e), row(100), ids{0, e.options().experts - 1, -1, -1}, weights{1, 1, 0, 0} {}
  Status dispatch(int layer) {
    auto r = e.dispatch({.layer = layer,
                         .rows = row.data(),
                         .row_bytes = 100,
                         .tokens = 1,
                         .ids = ids.data(),
                         .weights = weights.data()});
    return r ? Status::ok() : r.status();
  }
  Status combine(int layer) {
    std::fill_n(e.parts_buffer(), e.size() * 17 * 24, 1.0F);
    auto r = e.combine(layer, e.parts_buffer());
    return r ? Status::ok() : r.status();
  }
  Status layer(int layer) {
    RETURN_IF_ERROR(dispatch(layer));
    return combine(layer);
  }

  Exchange& e;
  std::vector<std::byte> row;
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

bool contains(const std::string& s, const std::string& part) {
  return s.find(part) != std::string::npos;
}

enum class When { kDispatch, kCombine, kBetween };
enum class How { kKill, kEnd, kFreeze };

class LocalFault : public testing::TestWithParam<std::tuple<When, How>> {};

// Rank 1 fails; each survivor names it, and the failure is final.
TEST_P(LocalFault, SurvivorsNameTheRank) {
  const auto [when, how] = GetParam();
  Ranks ranks(4, with_timeouts(4, 0.5, 0.5));
  std::vector<Status> got(4);
  std::vector<Status> again(4);
  const TimePoint began = Clock::now();
  ranks.run([&, when = when, how = how](Exchange& e) {
    OneToken one(e);
    const auto me = static_cast<size_t>(e.rank());
    const auto fail = [&](When now) {
      if (e.rank() != 1 || now != when) return false;
      if (how == How::kKill) ranks.group.faults->kill(1);
      if (how == How::kEnd) ranks.group.faults->end(1);
      if (how == How::kFreeze) ranks.group.faults->freeze(1);
      return true;
    };
    got[me] = one.layer(0);
    if (fail(When::kDispatch)) return;
    if (got[me]) got[me] = one.dispatch(1);
    if (fail(When::kCombine)) return;
    if (got[me]) got[me] = one.combine(1);
    if (fail(When::kBetween)) return;
    if (got[me]) {
      auto headers = e.all_gather({});
      if (!headers) got[me] = headers.status();
    }
    again[me] = one.dispatch(2);
  });
  const double took = to_seconds(Clock::now() - began);
  const char* place = when == When::kDispatch  ? "rank 1 was lost in layer 1, dispatch"
                      : when == When::kCombine ? "rank 1 was lost in layer 1, combine"
                                               : "rank 1 was lost before a step";
  const char* why = how == How::kEnd    ? "its process has ended"
                    : how == How::kKill ? "no sign of life"
                                        : "stuck";
  bool reason = false;
  for (const size_t r : {0U, 2U, 3U}) {
    EXPECT_EQ(got[r].code(), StatusCode::kRankLost);
    EXPECT_TRUE(contains(got[r].message(), place)) << got[r].message();
    reason = reason || contains(got[r].message(), why);
    EXPECT_EQ(again[r].message(), got[r].message());
  }
  EXPECT_TRUE(reason) << got[0].message();
  EXPECT_LT(took, how == How::kEnd ? 0.4 : 3.0);
}

INSTANTIATE_TEST_SUITE_P(All, LocalFault,
                         testing::Combine(testing::Values(When::kDispatch, When::kCombine,
                                                          When::kBetween),
                                          testing::Values(How::kKill, How::kEnd, How::kFreeze)));

TEST(Local, ASlowRankIsNoLostRank) {
  Ranks ranks(2, with_timeouts(2, 0.3, 10));
  ranks.group.faults->delay(1, std::chrono::milliseconds(400));
  ranks.run([&](Exchange& e) {
    OneToken one(e);
    EXPECT_TRUE(one.layer(0));
  });
}

TEST(Local, ALateRankIsWaitedFor) {
  Ranks ranks(2, with_timeouts(2, 0.3, 10));
  ranks.run([&](Exchange& e) {
    if (e.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(600));
    OneToken one(e);
    EXPECT_TRUE(e.all_gather({}).is_ok());
    EXPECT_TRUE(one.layer(0));
  });
}

TEST(Local, AbortEndsWaits) {
  Ranks ranks(2, with_timeouts(2, 10, 10));
  std::thread stopper([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ranks.ends[0]->abort();
  });
  OneToken one(*ranks.ends[0]);
  const TimePoint began = Clock::now();
  EXPECT_EQ(one.dispatch(0).code(), StatusCode::kCancelled);
  EXPECT_EQ(one.dispatch(0).code(), StatusCode::kCancelled);
  EXPECT_LT(to_seconds(Clock::now() - began), 2);
  stopper.join();
  // The peer learns of it rather than wait for its deadline.
  OneToken other(*ranks.ends[1]);
  const Status told = other.layer(0);
  EXPECT_EQ(told.code(), StatusCode::kRankLost);
  EXPECT_TRUE(contains(told.message(), "rank 0 gave up in layer 0, dispatch")) << told.message();
}

TEST(Local, TooManyTokensAndBadIds) {
  Options o = with_timeouts(1, 1, 1);
  for (const bool prefill : {false, true}) {
    Ranks ranks(1, o);
    std::vector<int32_t> ids(static_cast<size_t>(18 * o.topk), 0);
    std::vector<float> weights(ids.size());
    auto r = ranks.ends[0]->dispatch({.layer = 3,
                                      .any_prefill = prefill,
                                      .row_bytes = 4,
                                      .tokens = 18,
                                      .ids = ids.data(),
                                      .weights = weights.data()});
    ASSERT_FALSE(r.is_ok());
    EXPECT_TRUE(contains(r.status().message(),
                         prefill ? "M = 17 of normal mode; raise --chunked-prefill-size"
                                 : "M = 5 of low_latency mode; raise --max-dispatch-tokens"))
        << r.status().message();
  }
  Ranks ranks(2, conformance_options(2, Mode::kAuto));
  OneToken one(*ranks.ends[0]);
  one.ids[2] = 6;
  EXPECT_TRUE(contains(one.dispatch(4).message(), "token 0 of rank 0 names expert 6"));
  OneToken other(*ranks.ends[1]);
  EXPECT_TRUE(contains(other.dispatch(4).message(), "rank 0 gave up in layer 4, dispatch"));
}

TEST(Local, IdleRanksSleepUntilThereIsWork) {
  Ranks ranks(2, with_timeouts(2, 5, 5));
  ranks.run([&](Exchange& e) {
    if (e.rank() == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      EXPECT_TRUE(e.all_gather({.decode_rows = 3}).is_ok());
      return;
    }
    auto nothing = e.wait_for_peers(std::chrono::milliseconds(5));
    ASSERT_TRUE(nothing.is_ok());
    EXPECT_FALSE(*nothing);
    const TimePoint began = Clock::now();
    auto work = e.wait_for_peers(seconds(5));
    ASSERT_TRUE(work.is_ok());
    EXPECT_TRUE(*work);
    EXPECT_LT(to_seconds(Clock::now() - began), 2);
    auto headers = e.all_gather({});
    ASSERT_TRUE(headers.is_ok());
    EXPECT_EQ((*headers)[0].decode_rows, 3);
  });
}

// A fast peer's next header may arrive while a slow rank still reads the ones before.
TEST(Local, HeadersStayUntilTheNextCall) {
  Ranks ranks(2, with_timeouts(2, 5, 5));
  ranks.run([&](Exchange& e) {
    for (int step = 0; step < 50; ++step) {
      auto headers = e.all_gather({.decode_rows = step});
      ASSERT_TRUE(headers.is_ok());
      if (e.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      EXPECT_EQ((*headers)[0].decode_rows, step);
      EXPECT_EQ((*headers)[1].decode_rows, step);
    }
  });
}

TEST(Local, WakeEndsAnIdleWait) {
  Ranks ranks(2, with_timeouts(2, 30, 30));
  std::thread waker([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ranks.ends[0]->wake();
  });
  const TimePoint began = Clock::now();
  auto r = ranks.ends[0]->wait_for_peers(seconds(20));
  ASSERT_TRUE(r.is_ok());
  EXPECT_FALSE(*r);
  EXPECT_LT(to_seconds(Clock::now() - began), 5);
  waker.join();
}

TEST(Local, IdleRanksNoticeALostPeer) {
  Ranks ranks(2, with_timeouts(2, 30, 30));
  ranks.group.faults->end(1);
  auto r = ranks.ends[0]->wait_for_peers(seconds(20));
  ASSERT_FALSE(r.is_ok());
  EXPECT_TRUE(contains(r.status().message(),
                       "rank 1 was lost while idle: its process has ended; restart the group"));
}

TEST(Options, AreCheckedInTheWordsOfTheFlags) {
  Options o = conformance_options(2, Mode::kAuto);
  EXPECT_TRUE(check_options(o, 2));
  EXPECT_TRUE(contains(check_options(o, 3).message(), "--ep-size 3"));
  EXPECT_TRUE(contains(check_options(o, 4).message(), "does not divide the model's 6 experts"));
  o.max_dispatch_tokens = 0;
  EXPECT_TRUE(contains(check_options(o, 2).message(), "--max-dispatch-tokens"));
}

}  // namespace
}  // namespace sortie::exchange
