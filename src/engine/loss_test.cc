// Lost ranks under an engine: whatever happens to the ranks, each request ends as the undisturbed
// one, or marked and as a group without the lost experts computes it, or with a reason.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstdlib>
#include <map>
#include <random>
#include <thread>

#include "engine/ranks_test.h"

namespace sortie::engine {
namespace {

using exchange::OnLoss;

constexpr int kRanks = 4;

TestOptions group_of_four(OnLoss on_loss) {
  return {.ranks = kRanks,
          .pages = 60,
          .chunk = 8,
          .max_running = 4,
          .exchange_timeout = seconds(kSanitized ? 1.0 : 0.2),
          .on_loss = on_loss};
}

// The experts of ranks outside `members` give zero: their down projections are zeros. Nothing of
// the exchange or the recovery is in this judge; it is one rank alone.
std::shared_ptr<const model::Weights> without_experts(
    const std::shared_ptr<const model::Weights>& whole, uint64_t members) {
  static const std::vector<std::byte> zeros(1 << 20);
  auto weights = std::make_shared<model::Weights>(*whole);
  for (model::LayerWeights& l : weights->layers) {
    const size_t a_rank = l.moe.down.size() / kRanks;
    for (size_t e = 0; e < l.moe.down.size(); ++e) {
      if ((members >> (e / a_rank) & 1) != 0) continue;
      CHECK(l.moe.down[e].bytes() <= static_cast<int64_t>(zeros.size()));
      l.moe.down[e].codes = zeros.data();
    }
  }
  return weights;
}

// What one undisturbed rank answers, with the experts of `members`.
class Judge {
 public:
  std::vector<int32_t> tokens(const Request& request, uint64_t members) {
    const auto key = std::make_tuple(request.prompt, request.sampling.max_new_tokens,
                                     request.sampling.seed, members);
    auto it = known_.find(key);
    if (it == known_.end()) {
      Request alone = request;
      alone.rank = -1;
      it = known_.emplace(key, engine(members).ask(alone).tokens).first;
    }
    return it->second;
  }

 private:
  TestEngine& engine(uint64_t members) {
    auto& slot = engines_[members];
    if (!slot.second) {
      TestOptions options = group_of_four(OnLoss::kFail);
      options.ranks = 1;
      options.change_weights = [members](std::shared_ptr<const model::Weights> w) {
        return without_experts(w, members);
      };
      slot.first = std::make_unique<TestRanks>(options);
      slot.second = std::make_unique<TestEngine>(*slot.first);
    }
    return *slot.second;
  }
  std::map<std::tuple<std::vector<int32_t>, int64_t, uint64_t, uint64_t>, std::vector<int32_t>>
      known_;
  std::map<uint64_t, std::pair<std::unique_ptr<TestRanks>, std::unique_ptr<TestEngine>>> engines_;
};

Request request(std::mt19937_64& random, int64_t vocabulary) {
  Request r;
  const size_t rows = 1 + random() % 20;
  for (size_t i = 0; i < rows; ++i) {
    r.prompt.push_back(static_cast<int32_t>(random() % static_cast<uint64_t>(vocabulary)));
  }
  r.sampling.max_new_tokens = static_cast<int64_t>(1 + random() % 24);
  r.sampling.ignore_eos = true;
  if (random() % 2 == 0) {
    r.sampling.temperature = 0.8F;
    r.sampling.seed = random() % 1000;
  }
  r.rank = static_cast<int>(random() % kRanks);
  return r;
}

bool is_prefix(const std::vector<int32_t>& part, size_t length, const std::vector<int32_t>& whole) {
  return length <= part.size() && length <= whole.size() &&
         std::equal(part.begin(), part.begin() + static_cast<ptrdiff_t>(length), whole.begin());
}

// What must hold of any answer: complete and as undisturbed if unmarked, the unmarked beginning as
// undisturbed if marked.
void check(const Answer& a, const Request& r, Judge& judge, OnLoss on_loss) {
  ASSERT_EQ(a.finals.size(), 1U);
  const Event& last = a.finals[0];
  const std::vector<int32_t> whole = judge.tokens(r, 0b1111);
  EXPECT_TRUE(is_prefix(a.tokens, a.before_loss, whole));
  if (!last.degraded) {
    EXPECT_EQ(a.before_loss, a.tokens.size());
  }
  switch (last.finish) {
    case FinishReason::kLength:
      EXPECT_EQ(a.tokens.size(), static_cast<size_t>(r.sampling.max_new_tokens));
      EXPECT_TRUE(last.degraded || a.tokens == whole);
      EXPECT_FALSE(last.degraded && on_loss == OnLoss::kFail);
      break;
    case FinishReason::kRankLost:
      EXPECT_TRUE(last.error.find("rank ") != std::string::npos) << last.error;
      break;
    case FinishReason::kCancelled:
      break;
    default:
      ADD_FAILURE() << "reason " << static_cast<int>(last.finish) << ": " << last.error;
  }
}

// One life of a group: random requests and cancellations while ranks fail at random; then, with
// degrade, requests to the survivors, whose answers can be computed.
void live(uint64_t seed, OnLoss on_loss, Judge& judge) {
  SCOPED_TRACE(fmt::format("seed {}, {}", seed, on_loss == OnLoss::kFail ? "fail" : "degrade"));
  std::mt19937_64 random(seed);
  TestRanks ranks(group_of_four(on_loss));
  TestEngine engine(ranks);
  const int64_t vocabulary = ranks.config().vocab_size;
  std::vector<Request> requests;
  std::vector<uint64_t> ids;
  const auto submit = [&] {
    requests.push_back(request(random, vocabulary));
    ids.push_back(engine.submit(requests.back()));
  };
  for (int i = 0; i < 6; ++i) submit();
  const size_t faults = random() % 4;
  for (size_t i = 0; i < faults; ++i) {
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 20'000));
    const int rank = static_cast<int>(1 + random() % (kRanks - 1));
    switch (random() % 6) {
      case 0:
        ranks.faults().kill(rank);
        break;
      case 1:
        ranks.faults().end(rank);
        break;
      case 2:
        ranks.faults().move(rank, 1);
        break;
      case 3:  // slow, but below the deadline
        ranks.faults().delay(rank, std::chrono::milliseconds(1));
        break;
      case 4:  // a pause below or above the deadline, then it goes on
      case 5: {
        ranks.faults().pause(rank);
        std::this_thread::sleep_for(ranks.options().exchange_timeout * (random() % 2 == 0 ? 2 : 0) +
                                    std::chrono::milliseconds(5));
        ranks.faults().resume(rank);
        break;
      }
    }
    if (random() % 2 == 0) engine.engine->cancel(ids[random() % ids.size()]);
    submit();
  }
  if (on_loss == OnLoss::kDegrade && random() % 8 == 0) ranks.faults().end(0);
  for (int i = 0; i < 3; ++i) submit();
  for (size_t i = 0; i < ids.size(); ++i) check(engine.wait(ids[i]), requests[i], judge, on_loss);

  if (on_loss == OnLoss::kDegrade) {
    // The membership may still shrink, so what is checked is one answer that saw no change.
    const size_t before = engine.engine->losses().size();
    Request late = request(random, vocabulary);
    late.rank = 0;
    const Answer a = engine.ask(late);
    check(a, late, judge, on_loss);
    const auto losses = engine.engine->losses();
    uint64_t members = 0b1111;
    for (const exchange::Loss& l : losses) members &= ~(uint64_t{1} << l.rank);
    if (losses.size() == before && a.finals[0].finish == FinishReason::kLength) {
      EXPECT_EQ(a.finals[0].degraded, before > 0);
      EXPECT_EQ(a.tokens, judge.tokens(late, members));
    }
  }
  for (int r = 0; r < kRanks; ++r) ranks.faults().end(r);  // no thread waits for a lost one
}

// SORTIE_SOAK_SECONDS makes it longer; SORTIE_SEED repeats one life.
TEST(Loss, EveryRequestEndsRight) {
  Judge judge;
  const char* one = std::getenv("SORTIE_SEED");
  const char* soak = std::getenv("SORTIE_SOAK_SECONDS");
  uint64_t seed = one != nullptr ? std::stoull(one) : std::random_device()();
  RecordProperty("seed", std::to_string(seed));
  std::printf("first seed %llu\n", static_cast<unsigned long long>(seed));
  const Deadline deadline(seconds(soak != nullptr ? std::stod(soak) : 12));
  int lives = 0;
  do {
    live(seed, seed % 3 == 0 ? OnLoss::kFail : OnLoss::kDegrade, judge);
    ++seed;
    ++lives;
  } while (one == nullptr && !deadline.passed() && !HasFailure());
  std::printf("%d lives\n", lives);
}

// By hand: rank 2 ends while all have a request; the others' answers are complete and marked, and a
// later answer is what the remaining experts compute.
TEST(Loss, SurvivorsAnswerWithTheExpertsThatAreLeft) {
  Judge judge;
  TestRanks ranks(group_of_four(OnLoss::kDegrade));
  TestEngine engine(ranks);
  std::vector<uint64_t> ids;
  for (int rank = 0; rank < kRanks; ++rank) {
    ids.push_back(engine.submit({.prompt = {3, 1, 4, 1, 5},
                                 .sampling = {.max_new_tokens = 60, .ignore_eos = true},
                                 .rank = rank}));
  }
  for (const uint64_t id : ids) engine.wait_tokens(id, 3);
  ranks.faults().end(2);
  for (int rank = 0; rank < kRanks; ++rank) {
    const Answer a = engine.wait(ids[static_cast<size_t>(rank)]);
    if (rank == 2) {
      EXPECT_EQ(a.finals[0].finish, FinishReason::kRankLost);
      EXPECT_EQ(a.finals[0].error.substr(0, 16), "rank 2 was lost ") << a.finals[0].error;
      continue;
    }
    EXPECT_EQ(a.finals[0].finish, FinishReason::kLength);
    EXPECT_TRUE(a.finals[0].degraded);
    EXPECT_EQ(a.tokens.size(), 60U);
    EXPECT_LT(a.before_loss, 60U);
  }
  for (const int rank : {0, 1, 3}) {
    const Request later{.prompt = {2, 7, 1, 8}, .sampling = {.max_new_tokens = 20}, .rank = rank};
    const Answer a = engine.ask(later);
    EXPECT_TRUE(a.finals[0].degraded);
    EXPECT_EQ(a.tokens, judge.tokens(later, 0b1011));
    EXPECT_NE(a.tokens, judge.tokens(later, 0b1111));
  }
  const Answer refused = engine.ask({.prompt = {1}, .rank = 2});
  EXPECT_EQ(refused.finals[0].finish, FinishReason::kRankLost);
  engine.engine->stop();
  EXPECT_TRUE(engine.engine->join().is_ok());
}

}  // namespace
}  // namespace sortie::engine
