#include "engine/engine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "engine/ranks_test.h"

// The engine over real models on the reference backend: the bits of an answer depend on nothing but
// the request.
namespace sortie::engine {
namespace {

using exchange::Mode;

// Twelve requests that differ in everything that a request may differ in.
std::vector<Request> dozen() {
  std::vector<Request> requests;
  for (int i = 0; i < 12; ++i) {
    Request r;
    const int tokens = 1 + i * (kSanitized ? 2 : 5);
    for (int t = 0; t < tokens; ++t) r.prompt.push_back((37 * i + 11 * t + t * t) % 512);
    r.sampling = {.max_new_tokens = kSanitized ? 2 + i % 3 : 4 + (i * 7) % 13,
                  .ignore_eos = true,
                  .logprobs = true,
                  .top_logprobs = i % 3};
    if (i % 3 == 1) {
      r.sampling.temperature = 0.9F;
      r.sampling.top_p = 0.95F;
      r.sampling.top_k = 50;
      r.sampling.seed = static_cast<uint64_t>(i);
    }
    if (i % 4 == 3) {
      r.sampling.repetition_penalty = 1.2F;
      r.sampling.frequency_penalty = 0.1F;
    }
    requests.push_back(std::move(r));
  }
  return requests;
}

void expect_same(const Answer& a, const Answer& b, const std::string& what) {
  EXPECT_EQ(a.tokens, b.tokens) << what;
  EXPECT_EQ(a.logprobs, b.logprobs) << what;  // bit for bit
  ASSERT_EQ(a.top.size(), b.top.size()) << what;
  for (size_t i = 0; i < a.top.size(); ++i) {
    ASSERT_EQ(a.top[i].size(), b.top[i].size()) << what;
    for (size_t j = 0; j < a.top[i].size(); ++j) {
      EXPECT_EQ(a.top[i][j].id, b.top[i][j].id) << what;
      EXPECT_EQ(a.top[i][j].logprob, b.top[i][j].logprob) << what;
    }
  }
  ASSERT_EQ(a.finals.size(), 1u) << what;
  ASSERT_EQ(b.finals.size(), 1u) << what;
  EXPECT_EQ(a.finals[0].finish, b.finals[0].finish) << what;
  EXPECT_EQ(a.finals[0].generated_tokens, b.finals[0].generated_tokens) << what;
}

// Each request alone on one rank, its prompt whole: what everything else is compared with.
const std::vector<Answer>& alone() {
  static const std::vector<Answer> answers = [] {
    TestRanks ranks({});
    TestEngine engine(ranks);
    std::vector<Answer> all;
    for (const Request& r : dozen()) all.push_back(engine.ask(r));
    return all;
  }();
  return answers;
}

void expect_as_alone(TestEngine& engine, const std::string& what) {
  const std::vector<Answer> answers = engine.ask_all(dozen());
  for (size_t i = 0; i < answers.size(); ++i) {
    expect_same(answers[i], alone()[i], what + ", request " + std::to_string(i));
  }
}

TEST(RankEngine, AnswersAreWhatWasAskedFor) {
  const std::vector<Request> requests = dozen();
  for (size_t i = 0; i < requests.size(); ++i) {
    const Answer& a = alone()[i];
    const auto wanted = static_cast<size_t>(requests[i].sampling.max_new_tokens);
    EXPECT_EQ(a.tokens.size(), wanted);
    ASSERT_EQ(a.finals.size(), 1u);
    EXPECT_EQ(a.finals[0].finish, FinishReason::kLength);
    for (size_t t = 0; t < a.tokens.size(); ++t) {
      EXPECT_LE(a.logprobs[t], 0);
      ASSERT_EQ(a.top[t].size(), static_cast<size_t>(requests[i].sampling.top_logprobs));
      if (i % 3 == 2) {
        EXPECT_GE(a.top[t][0].logprob, a.top[t][1].logprob);
        EXPECT_GE(a.top[t][0].logprob, a.logprobs[t]);
        if (requests[i].sampling.repetition_penalty == 1) {
          EXPECT_EQ(a.top[t][0].id, a.tokens[t]);
          EXPECT_EQ(a.top[t][0].logprob, a.logprobs[t]);
        }
      }
    }
  }
}

TEST(RankEngine, ABatchChangesNothing) {
  TestRanks ranks({});
  TestEngine engine(ranks);
  expect_as_alone(engine, "batch of 12");
  expect_as_alone(engine, "the same again, on used pages");
}

TEST(RankEngine, ChunksChangeNothing) {
  for (const int64_t chunk : {1, 7, 256}) {
    TestRanks ranks({.chunk = chunk, .max_running = 5});
    TestEngine engine(ranks);
    expect_as_alone(engine, "chunk " + std::to_string(chunk));
  }
}

TEST(RankEngine, PreemptionChangesNothing) {
  std::vector<Request> requests = dozen();
  requests.resize(kSanitized ? 4 : 6);
  for (Request& r : requests) r.sampling.max_new_tokens = 30;
  std::vector<Answer> unhurried;
  {
    TestRanks ranks({});
    TestEngine engine(ranks);
    for (const Request& r : requests) unhurried.push_back(engine.ask(r));
    EXPECT_EQ(engine.preemptions(), 0);
  }
  for (const TestOptions& tight : {TestOptions{.pages = 60, .page_size = 1, .chunk = 20},
                                   {.pages = 32, .page_size = 2, .chunk = 7},
                                   {.ranks = 2, .pages = 56, .page_size = 1}}) {
    TestRanks ranks(tight);
    TestEngine engine(ranks);
    const std::vector<Answer> answers = engine.ask_all(requests);
    for (size_t i = 0; i < answers.size(); ++i) {
      expect_same(answers[i], unhurried[i], "request " + std::to_string(i));
    }
    EXPECT_GT(engine.preemptions(), 0) << tight.pages;
  }
}

TEST(RankEngine, RanksModesAndThreadsChangeNothing) {
  const std::vector<TestOptions> groups = {{.ranks = 2},
                                           {.ranks = 4, .chunk = 16},
                                           {.ranks = 2, .mode = Mode::kNormal},
                                           {.ranks = 2, .mode = Mode::kLowLatency},
                                           {.threads = 2},
                                           {.ranks = 2, .threads = 2, .pages = 11}};
  for (size_t i = 0; i < groups.size(); ++i) {
    TestRanks ranks(groups[i]);
    TestEngine engine(ranks);
    expect_as_alone(engine, "group " + std::to_string(i));
  }
}

TEST(RankEngine, IdleRanksJoinTheOthersAndSleepBetween) {
  TestRanks ranks({.ranks = 2});
  TestEngine engine(ranks);
  for (const int rank : {1, 0, 1}) {
    Request r = dozen()[4];
    r.rank = rank;
    expect_same(engine.ask(r), alone()[4], "rank " + std::to_string(rank));
  }
  const auto stats = engine.engine->stats();
  EXPECT_EQ(stats[1].generated_tokens, 2 * stats[0].generated_tokens);
  EXPECT_EQ(stats[0].prompt_tokens, static_cast<int64_t>(dozen()[4].prompt.size()));
  EXPECT_GT(stats[0].prefill_seconds, 0);
  EXPECT_GT(stats[0].decode_seconds, 0);
}

TEST(RankEngine, CancelsWhileOthersGoOn) {
  TestRanks ranks({.ranks = 2});
  TestEngine engine(ranks);
  Request endless = dozen()[0];
  endless.sampling.max_new_tokens = 200;
  const uint64_t a = engine.submit(endless);
  const uint64_t b = engine.submit(dozen()[5]);
  const uint64_t c = engine.submit(dozen()[8]);
  engine.wait_tokens(a, 2);
  engine.engine->cancel(a);
  const Answer cancelled = engine.wait(a);
  EXPECT_EQ(cancelled.finals[0].finish, FinishReason::kCancelled);
  EXPECT_LT(cancelled.tokens.size(), 200u);
  EXPECT_EQ(cancelled.finals[0].generated_tokens, static_cast<int64_t>(cancelled.tokens.size()));
  expect_same(engine.wait(b), alone()[5], "beside a cancelled one");
  expect_same(engine.wait(c), alone()[8], "beside a cancelled one");
  engine.engine->cancel(a);  // long over
  expect_same(engine.ask(dozen()[2]), alone()[2], "after a cancelled one");
}

TEST(RankEngine, AStopByOneRankStopsTheGroup) {
  TestRanks ranks({.ranks = 2});
  std::mutex mutex;
  std::map<uint64_t, FinishReason> finals;
  const auto sink = [&](const Event& e) {
    const std::lock_guard lock(mutex);
    if (e.finish != FinishReason::kNone) {
      EXPECT_TRUE(finals.emplace(e.request, e.finish).second);
    }
  };
  RankEngine zero(ranks.model(0), ranks.engine_options(), sink);
  RankEngine one(ranks.model(1), ranks.engine_options(), sink);
  Request endless = dozen()[0];
  endless.sampling.max_new_tokens = 200;
  for (uint64_t id = 1; id <= 20; ++id) {
    endless.id = id;
    (id % 2 == 0 ? zero : one).submit(endless);
  }
  zero.start();
  one.start();
  one.stop();
  EXPECT_TRUE(zero.join().is_ok());
  EXPECT_TRUE(one.join().is_ok());
  endless.id = 21;
  zero.submit(endless);
  ASSERT_EQ(finals.size(), 21u);
  for (const auto& [id, reason] : finals) EXPECT_EQ(reason, FinishReason::kCancelled) << id;
}

TEST(RankEngine, AnEngineThatNeverStartedEndsItsRequests) {
  TestRanks ranks({});
  std::vector<Event> events;
  {
    RankEngine engine(ranks.model(0), {}, [&](const Event& e) { events.push_back(e); });
    engine.submit({.id = 3, .prompt = {1}});
  }
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].request, 3u);
  EXPECT_EQ(events[0].finish, FinishReason::kCancelled);
}

TEST(RankEngine, ALostRankEndsEveryRequestWithItsSentence) {
  TestRanks ranks({.ranks = 2, .exchange_timeout = seconds(0.5)});
  TestEngine engine(ranks);
  Request endless = dozen()[0];
  endless.sampling.max_new_tokens = 200;
  std::vector<uint64_t> ids;
  for (int i = 0; i < 40; ++i) ids.push_back(engine.submit(endless));
  engine.wait_tokens(ids[0], 2);
  ranks.faults().end(1);
  for (const uint64_t id : ids) {
    const Answer a = engine.wait(id);
    EXPECT_EQ(a.finals[0].finish, FinishReason::kRankLost);
    EXPECT_NE(a.finals[0].error.find("rank"), std::string::npos) << a.finals[0].error;
  }
  const Status status = engine.engine->join();
  EXPECT_EQ(status.code(), StatusCode::kRankLost);
  Request late = dozen()[1];
  late.rank = 0;
  const Answer a = engine.ask(late);
  EXPECT_EQ(a.finals[0].finish, FinishReason::kRankLost);
  EXPECT_EQ(a.finals[0].error, status.message());
}

// Rank 1 behind frames, as if in a process of its own.
TEST(RemoteRank, ServesAsALocalOneDoes) {
  TestRanks ranks({.ranks = 2});
  std::unique_ptr<RemoteRank> remote;
  auto owned = std::make_unique<RemoteLink>("rank 1", [&](std::span<const std::byte> frame) {
    EXPECT_TRUE(remote->on_frame(frame).is_ok());
  });
  RemoteLink* link = owned.get();
  remote = std::make_unique<RemoteRank>(
      ranks.model(1), ranks.engine_options(),
      [link](std::span<const std::byte> frame) { EXPECT_TRUE(link->on_frame(frame).is_ok()); });
  std::vector<std::unique_ptr<RankLink>> links;
  links.push_back(std::make_unique<LocalLink>(ranks.model(0), ranks.engine_options()));
  links.push_back(std::move(owned));
  TestEngine engine(std::move(links));
  remote->start();
  expect_as_alone(engine, "a remote rank");
  EXPECT_GT(engine.engine->stats()[1].generated_tokens, 0);

  const std::vector<std::byte> frame = encode(Request{.id = 1u << 20, .prompt = {1}});
  EXPECT_FALSE(remote->on_frame(std::span(frame).first(10)).is_ok());
  EXPECT_FALSE(remote->on_frame(encode(Event{})).is_ok());
  engine.engine->stop();
  EXPECT_TRUE(remote->join().is_ok());
  EXPECT_TRUE(engine.engine->join().is_ok());
}

// The bundled model against its golden continuations, for a few short prompts.
TEST(Goldens, MiniContinuesAsItsReference) {
  const nlohmann::json golden = nlohmann::json::parse(
      std::ifstream(std::string(SORTIE_SOURCE_DIR) + "/models/mini/golden.json"));
  constexpr size_t kTokens = kSanitized ? 2 : 12;
  for (const int n : {1, 2}) {
    TestRanks ranks({.folder = "models/mini", .ranks = n, .pages = 32, .page_size = 16});
    TestEngine engine(ranks);
    std::vector<Request> requests;
    const std::vector<size_t> rows = {7, 11, 5};
    for (const size_t row : rows) {
      requests.push_back({.prompt = golden[row]["prompt_ids"].get<std::vector<int32_t>>(),
                          .sampling = {.max_new_tokens = kTokens, .top_logprobs = 8}});
    }
    const std::vector<Answer> answers = engine.ask_all(requests);
    for (size_t i = 0; i < rows.size(); ++i) {
      const auto ids = golden[rows[i]]["greedy_ids"].get<std::vector<int32_t>>();
      ASSERT_EQ(answers[i].tokens.size(), kTokens);
      for (size_t t = 0; t < kTokens; ++t) {
        ASSERT_EQ(answers[i].tokens[t], ids[t]) << "prompt " << rows[i] << " token " << t;
        for (size_t k = 0; k < 8; ++k) {
          const auto& [id, logprob] = answers[i].top[t][k];
          for (const auto& entry : golden[rows[i]]["top_logprobs"][t]) {
            if (entry[0].get<int32_t>() != id) continue;
            const auto expected = entry[1].get<float>();
            EXPECT_NEAR(logprob, expected, 2e-4 * std::max(1.0F, std::fabs(expected)));
          }
        }
      }
    }
  }
}

TEST(Goldens, MiniStopsAtItsEndOfSentence) {
  if (kSanitized) GTEST_SKIP() << "slow here, and nothing in it is new to a sanitizer";
  const nlohmann::json golden = nlohmann::json::parse(
      std::ifstream(std::string(SORTIE_SOURCE_DIR) + "/models/mini/golden.json"));
  TestRanks ranks({.folder = "models/mini", .pages = 32});
  TestEngine engine(ranks);
  auto ids = golden[11]["greedy_ids"].get<std::vector<int32_t>>();
  const Answer a = engine.ask({.prompt = golden[11]["prompt_ids"].get<std::vector<int32_t>>()});
  EXPECT_EQ(a.finals[0].finish, FinishReason::kStop);
  EXPECT_EQ(a.finals[0].matched_stop, ids.back());
  EXPECT_EQ(a.finals[0].generated_tokens, static_cast<int64_t>(ids.size()));
  ids.pop_back();
  EXPECT_EQ(a.tokens, ids);
}

}  // namespace
}  // namespace sortie::engine
