// What engine_test.cc needs: ranks of this process and an engine whose answers are kept.
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/threads.h"
#include "engine/group.h"
#include "exchange/local.h"
#include "model/model.h"

namespace sortie::engine {

// Sanitizers make the reference backend ten to fifty times slower: tests then take fewer tokens.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

// How a test's group of ranks is made.
struct TestOptions {
  std::string folder = "tests/data/tiny/v3-yarn";  // below the source folder
  int ranks = 1;
  int threads = 1;
  int32_t pages = 200;
  int64_t page_size = 8;
  int64_t chunk = 64;
  int max_running = 16;
  int64_t context_length = 256;
  exchange::Mode mode = exchange::Mode::kAuto;
  Duration exchange_timeout = seconds(10);
  exchange::OnLoss on_loss = exchange::OnLoss::kFail;
  // Reads a rank's weights before its model takes them; null = as loaded.
  std::function<std::shared_ptr<const model::Weights>(std::shared_ptr<const model::Weights>)>
      change_weights = nullptr;
};

// A request's stream as a test compares it.
struct Answer {
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  std::vector<std::vector<TokenLogprob>> top;
  size_t before_loss = 0;  // tokens that came unmarked
  std::vector<Event> finals;
};

// Ranks of this process on the reference backend, with their models but not yet their engines.
class TestRanks {
 public:
  explicit TestRanks(TestOptions options);
  model::Model& model(int rank) { return *models_[static_cast<size_t>(rank)]; }
  exchange::FaultControl& faults() { return *group_.faults; }
  const model::Config& config() const { return config_; }
  EngineOptions engine_options() const;
  const TestOptions& options() const { return options_; }
  std::vector<std::unique_ptr<RankLink>> local_links();

 private:
  const TestOptions options_;
  model::Config config_;
  exchange::LocalGroup group_;
  std::vector<std::unique_ptr<ThreadPool>> threads_;
  std::vector<std::unique_ptr<exchange::Exchange>> exchanges_;
  std::vector<std::unique_ptr<model::Model>> models_;
};

// An Engine whose answers are kept. Every wait has a deadline and fails the test when it passes.
class TestEngine {
 public:
  explicit TestEngine(std::vector<std::unique_ptr<RankLink>> links, bool degrade = false);
  explicit TestEngine(TestRanks& ranks)
      : TestEngine(ranks.local_links(), ranks.options().on_loss == exchange::OnLoss::kDegrade) {}
  ~TestEngine() { engine.reset(); }

  uint64_t submit(Request request);
  // Until this request has ended / has so many tokens.
  Answer wait(uint64_t id);
  void wait_tokens(uint64_t id, size_t tokens);
  Answer ask(Request request) { return wait(submit(std::move(request))); }
  // All at once.
  std::vector<Answer> ask_all(const std::vector<Request>& requests);
  int64_t preemptions() const;

 private:
  void on_event(const Event& event);
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, Answer> answers_;

 public:
  std::unique_ptr<Engine> engine;
};

}  // namespace sortie::engine
