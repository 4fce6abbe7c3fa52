#include "exchange/local.h"

#include <gtest/gtest.h>

#include <array>
#include <barrier>
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

// ---- Going on without a rank (kDegrade)

Options degrading(int ranks, double exchange, double step = 20) {
  Options o = with_timeouts(ranks, exchange, step);
  o.on_loss = OnLoss::kDegrade;
  return o;
}

// One step of two layers, as the engine runs it.
Status one_step(Exchange& e) {
  OneToken one(e);
  RETURN_IF_ERROR(e.all_gather({}).status());
  RETURN_IF_ERROR(one.layer(0));
  RETURN_IF_ERROR(one.layer(1));
  return e.settle();
}

// A rank's way through `steps` good steps, as the engine goes it.
struct Walk {
  int good = 0;
  std::vector<Loss> lost;
  Status status;
};
Walk walk(Exchange& e, int steps, const std::function<void(int good)>& before_step) {
  Walk w;
  while (w.good < steps) {
    before_step(w.good);
    const Status s = one_step(e);
    if (s) {
      ++w.good;
      continue;
    }
    const Result<Recovery> r = e.recover(s);
    if (!r) {
      w.status = r.status();
      e.leave(w.status);
      return w;
    }
    w.good += r->step_stands ? 1 : 0;
    w.lost.insert(w.lost.end(), r->lost.begin(), r->lost.end());
  }
  return w;
}

std::vector<Walk> walk_all(Ranks& ranks, int steps,
                           const std::function<void(Exchange&, int)>& before) {
  std::vector<Walk> walks(ranks.ends.size());
  ranks.run([&](Exchange& e) {
    walks[static_cast<size_t>(e.rank())] = walk(e, steps, [&](int good) { before(e, good); });
  });
  return walks;
}

class LocalDegrade : public testing::TestWithParam<How> {};

// Rank 2 fails between steps; the others agree, and what they compute afterwards is what the
// definition says of a group without its experts.
TEST_P(LocalDegrade, SurvivorsGoOn) {
  const How how = GetParam();
  Ranks ranks(4, degrading(4, 0.3, how == How::kFreeze ? 0.3 : 20));
  std::vector<std::string> results(4);
  const TimePoint began = Clock::now();
  const std::vector<Walk> walks = walk_all(ranks, 6, [&](Exchange& e, int good) {
    if (e.rank() != 2 || good != 3) return;
    if (how == How::kKill) ranks.group.faults->kill(2);
    if (how == How::kEnd) ranks.group.faults->end(2);
    if (how == How::kFreeze) ranks.group.faults->freeze(2);
  });
  EXPECT_LT(to_seconds(Clock::now() - began), 3);
  for (const size_t r : {0U, 1U, 3U}) {
    EXPECT_TRUE(walks[r].status) << walks[r].status.message();
    EXPECT_EQ(walks[r].good, 6);
    ASSERT_EQ(walks[r].lost.size(), 1U);
    EXPECT_EQ(walks[r].lost[0].rank, 2);
    EXPECT_EQ(walks[r].lost[0].sentence, walks[0].lost[0].sentence);
    EXPECT_EQ(ranks.ends[r]->members(), 0b1011U);
  }
  EXPECT_TRUE(contains(walks[0].lost[0].sentence, "rank 2 was lost before a step: "))
      << walks[0].lost[0].sentence;
  EXPECT_EQ(walks[2].good, 3);
  EXPECT_EQ(walks[2].status.code(), StatusCode::kRankLost);
  // A frozen rank misses the others as they miss it, and may find that first.
  if (how != How::kFreeze) {
    EXPECT_TRUE(contains(walks[2].status.message(), how == How::kEnd
                                                        ? "rank 2 was lost "
                                                        : "rank 2 is out of the group and ends"))
        << walks[2].status.message();
  }
  ranks.run([&](Exchange& e) {
    if (e.rank() != 2) results[static_cast<size_t>(e.rank())] = conform(e, 3, 100);
  });
  for (const std::string& error : results) EXPECT_EQ(error, "");
}

INSTANTIATE_TEST_SUITE_P(All, LocalDegrade, testing::Values(How::kKill, How::kEnd, How::kFreeze));

// Like a process that was stopped: what it still writes when it goes on must not reach anything
// that the others read. conform() checks every byte; the poison makes reuse visible.
TEST(LocalDegrade, ALateRankIsFencedAndCorruptsNothing) {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    Ranks ranks(4, degrading(4, 0.15));
    std::vector<std::string> results(4);
    std::thread stopper([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(3 * seed));
      ranks.group.faults->pause(3);
    });
    ranks.run([&](Exchange& e) {
      std::string error = conform(e, seed, 1'000'000);
      const Result<Recovery> r = e.recover(Status::rank_lost(error));
      if (e.rank() == 3) {
        EXPECT_FALSE(r);
        EXPECT_TRUE(contains(r.status().message(),
                             "rank 3 is out of the group and ends: rank 0 "
                             "went on without it"))
            << r.status().message();
        return;
      }
      ASSERT_TRUE(r) << r.status().message();
      if (e.rank() == 0) ranks.group.faults->resume(3);
      results[static_cast<size_t>(e.rank())] = conform(e, seed, 300);
    });
    stopper.join();
    for (const std::string& error : results) EXPECT_EQ(error, "");
  }
}

TEST(LocalDegrade, OneLossAfterAnotherUpToTheLastRank) {
  Ranks ranks(4, degrading(4, 0.2));
  const std::vector<Walk> walks = walk_all(ranks, 9, [&](Exchange& e, int good) {
    if (e.rank() == 1 && good == 2) ranks.group.faults->end(1);
    if (e.rank() == 3 && good == 4) ranks.group.faults->kill(3);
    if (e.rank() == 2 && good == 6) ranks.group.faults->freeze(2), ranks.group.faults->kill(2);
  });
  EXPECT_TRUE(walks[0].status) << walks[0].status.message();
  EXPECT_EQ(walks[0].good, 9);
  EXPECT_EQ(walks[0].lost.size(), 3U);
  EXPECT_EQ(ranks.ends[0]->members(), 1U);
  EXPECT_EQ(walks[1].good, 2);
  EXPECT_EQ(walks[3].good, 4);
  EXPECT_EQ(walks[2].good, 6);
}

// Two at once, and the one that notices dies before it can report.
TEST(LocalDegrade, ARankLostDuringTheAgreement) {
  Ranks ranks(4, degrading(4, 0.3));
  const TimePoint began = Clock::now();
  std::vector<Walk> walks(4);
  ranks.run([&](Exchange& e) {
    const auto me = static_cast<size_t>(e.rank());
    if (e.rank() == 1) {
      EXPECT_TRUE(one_step(e));
      return ranks.group.faults->kill(1);
    }
    if (e.rank() == 2) {
      EXPECT_TRUE(one_step(e));
      EXPECT_FALSE(one_step(e));
      return ranks.group.faults->kill(2);  // has told the others, but does not agree
    }
    walks[me] = walk(e, 4, [](int) {});
  });
  EXPECT_LT(to_seconds(Clock::now() - began), 3);
  for (const size_t r : {0U, 3U}) {
    EXPECT_TRUE(walks[r].status) << walks[r].status.message();
    EXPECT_EQ(walks[r].good, 4);
    EXPECT_EQ(ranks.ends[r]->members(), 0b1001U);
  }
}

TEST(LocalDegrade, WithoutRankZeroTheGroupEnds) {
  for (const bool cut : {false, true}) {
    Ranks ranks(4, degrading(4, 0.25));
    const std::vector<Walk> walks = walk_all(ranks, 6, [&](Exchange& e, int good) {
      if (e.rank() != 0 || good != 2) return;
      if (!cut) return ranks.group.faults->end(0);
      ranks.group.faults->move(2, 1);
      ranks.group.faults->move(3, 1);
    });
    if (!cut) {
      for (const Walk& w : walks) {
        // A slow rank may hear of the end before it knows that step 2 stood.
        EXPECT_TRUE(w.good == 1 || w.good == 2) << w.good;
        EXPECT_TRUE(contains(w.status.message(), "rank 0 was lost")) << w.status.message();
      }
      continue;
    }
    for (const size_t r : {0U, 1U}) {
      EXPECT_EQ(walks[r].good, 6) << walks[r].status.message();
      EXPECT_EQ(ranks.ends[r]->members(), 0b0011U);
    }
    for (const size_t r : {2U, 3U}) {
      EXPECT_LE(walks[r].good, 3);
      // Where it was when the cut came is a matter of luck.
      EXPECT_TRUE(contains(walks[r].status.message(), "rank 0 was lost "))
          << walks[r].status.message();
      EXPECT_TRUE(contains(walks[r].status.message(), "it holds the front, so the group ends"));
    }
  }
}

// Some ranks have finished the step when the loss is found, others have not: all must say the same
// of it.
TEST(LocalDegrade, AStepStandsForAllOrForNone) {
  for (const bool all_finished : {false, true}) {
    Ranks ranks(4, degrading(4, 0.25));
    std::array<bool, 4> stands{};
    std::barrier dispatched(4);
    ranks.run([&](Exchange& e) {
      OneToken one(e);
      ASSERT_TRUE(e.all_gather({}));
      ASSERT_TRUE(one.dispatch(0));
      dispatched.arrive_and_wait();
      Status s;
      if (e.rank() == 3) {
        // Its parts reach ranks 0 and 2 alone, or everybody; then it is gone.
        if (!all_finished) ranks.group.faults->move(1, 1);
        std::fill_n(e.parts_buffer(), 4 * 17 * 24, 1.0F);
        (void)e.combine(0, e.parts_buffer());
        ranks.group.faults->kill(3);
        return;
      }
      if (all_finished) {
        ASSERT_TRUE(one.combine(0));
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        ranks.group.faults->move(1, 0);
        s = one.combine(0);
        EXPECT_EQ(s.is_ok(), e.rank() != 1);
      }
      if (s) s = e.settle();
      ASSERT_FALSE(s);
      const Result<Recovery> r = e.recover(s);
      ASSERT_TRUE(r) << r.status().message();
      stands[static_cast<size_t>(e.rank())] = r->step_stands;
    });
    for (const size_t r : {0U, 1U, 2U}) EXPECT_EQ(stands[r], all_finished);
  }
}

TEST(LocalDegrade, IdleRanksAgreeToo) {
  Ranks ranks(3 + 1, degrading(4, 0.3));
  ranks.group.faults->end(1);
  ranks.run([&](Exchange& e) {
    auto r = e.wait_for_peers(seconds(5));
    ASSERT_FALSE(r);
    const Result<Recovery> recovery = e.recover(r.status());
    if (e.rank() == 1) {
      EXPECT_FALSE(recovery);
      return;
    }
    ASSERT_TRUE(recovery) << recovery.status().message();
    EXPECT_FALSE(recovery->step_stands);
    ASSERT_EQ(recovery->lost.size(), 1U);
    EXPECT_EQ(recovery->lost[0].sentence, "rank 1 was lost while idle: its process has ended");
    EXPECT_TRUE(one_step(e));
  });
}

// A rank that was told to stop has left while another still finds a loss: that one stops too.
TEST(LocalDegrade, AStopIsNotMistakenForALoss) {
  for (const int leaver : {0, 1}) {
    Ranks ranks(2 + 2, degrading(4, 0.2));
    ranks.run([&](Exchange& e) {
      ASSERT_TRUE(one_step(e));
      if (e.rank() == 3) return ranks.group.faults->kill(3);
      if (e.rank() == leaver) return e.leave(Status::ok());
      const Status s = one_step(e);
      ASSERT_FALSE(s);
      const Result<Recovery> r = e.recover(s);
      ASSERT_FALSE(r);
      EXPECT_EQ(r.status().code(), StatusCode::kCancelled) << r.status().message();
      e.leave(Status::ok());
    });
  }
}

TEST(LocalDegrade, InFailModeThereIsNoRecovery) {
  Ranks ranks(2, with_timeouts(2, 0.3, 5));
  ranks.group.faults->end(1);
  const Status s = one_step(*ranks.ends[0]);
  EXPECT_EQ(s.code(), StatusCode::kRankLost);
  EXPECT_EQ(ranks.ends[0]->recover(s).status().message(), s.message());
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
