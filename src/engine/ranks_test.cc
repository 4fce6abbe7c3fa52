#include "engine/ranks_test.h"

#include <gtest/gtest.h>

#include <utility>

#include "backends/reference/reference.h"
#include "model/weights.h"

namespace sortie::engine {

namespace {

using AllWeights = std::vector<std::shared_ptr<const model::Weights>>;

// Loaded once a test program.
const AllWeights& weights_of(const std::string& folder, const model::Config& config, int ranks) {
  static std::map<std::pair<std::string, int>, AllWeights> loaded;
  AllWeights& all = loaded[{folder, ranks}];
  if (all.empty()) {
    auto result = model::load_weights(folder, config, {.ranks = ranks, .quiet = true});
    CHECK(result.is_ok(), result.status().message());
    all = std::move(*result);
  }
  return all;
}

}  // namespace

TestRanks::TestRanks(TestOptions options) : options_(std::move(options)) {
  const std::string folder = std::string(SORTIE_SOURCE_DIR) + "/" + options_.folder;
  auto config = model::load_config(folder);
  CHECK(config.is_ok(), config.status().message());
  config_ = std::move(*config);
  const AllWeights& weights = weights_of(folder, config_, options_.ranks);
  const int64_t most = options_.chunk + options_.max_running;
  const bool narrow = options_.mode == exchange::Mode::kAuto;
  const exchange::Options x{
      .experts = config_.n_routed_experts,
      .topk = config_.num_experts_per_tok,
      .hidden = config_.hidden_size,
      .widest_row_bytes = quant::act_row_bytes(quant::ActFormat::kF32, config_.hidden_size),
      .max_dispatch_tokens = narrow ? options_.max_running : most,
      .max_normal_tokens = most,
      .mode = options_.mode,
      .on_loss = options_.on_loss,
      .exchange_timeout = options_.exchange_timeout,
      .poison = true};
  group_ = exchange::make_local_group_with_faults(options_.ranks, x.window_bytes(options_.ranks));
  const model::ModelOptions m{.page_size = options_.page_size,
                              .pages = options_.pages,
                              .decode_segment = 16,
                              .context_length = options_.context_length};
  for (int i = 0; i < options_.ranks; ++i) {
    const auto rank = static_cast<size_t>(i);
    threads_.push_back(std::make_unique<ThreadPool>(options_.threads, std::vector<int>{}, false));
    exchanges_.push_back(exchange::make_exchange(group_.transports[rank], x));
    models_.push_back(model::make_model(
        config_, options_.change_weights ? options_.change_weights(weights[rank]) : weights[rank],
        reference::backend(), *threads_[rank], *exchanges_[rank], m));
  }
}

EngineOptions TestRanks::engine_options() const {
  return {.max_running_requests = options_.max_running, .chunked_prefill_size = options_.chunk};
}

std::vector<std::unique_ptr<RankLink>> TestRanks::local_links() {
  std::vector<std::unique_ptr<RankLink>> links;
  for (const auto& model : models_) {
    links.push_back(std::make_unique<LocalLink>(*model, engine_options()));
  }
  return links;
}

TestEngine::TestEngine(std::vector<std::unique_ptr<RankLink>> links, bool degrade)
    : engine(std::make_unique<Engine>(std::move(links), degrade)) {
  engine->start();
}

uint64_t TestEngine::submit(Request request) {
  return engine->submit(std::move(request), [this](const Event& e) { on_event(e); });
}

void TestEngine::on_event(const Event& event) {
  const std::lock_guard lock(mutex_);
  Answer& a = answers_[event.request];
  EXPECT_TRUE(a.finals.empty()) << "an event after the last";
  if (event.token >= 0) {
    a.tokens.push_back(event.token);
    if (!event.degraded) a.before_loss = a.tokens.size();
    a.logprobs.push_back(event.logprob);
    a.top.push_back(event.top);
  }
  if (event.finish != FinishReason::kNone) a.finals.push_back(event);
  changed_.notify_all();
}

Answer TestEngine::wait(uint64_t id) {
  std::unique_lock lock(mutex_);
  EXPECT_TRUE(changed_.wait_for(lock, seconds(100), [&] { return !answers_[id].finals.empty(); }));
  Answer a = answers_[id];
  if (a.finals.empty()) a.finals.emplace_back();
  return a;
}

void TestEngine::wait_tokens(uint64_t id, size_t tokens) {
  std::unique_lock lock(mutex_);
  EXPECT_TRUE(
      changed_.wait_for(lock, seconds(100), [&] { return answers_[id].tokens.size() >= tokens; }));
}

std::vector<Answer> TestEngine::ask_all(const std::vector<Request>& requests) {
  std::vector<uint64_t> ids;
  for (const Request& r : requests) ids.push_back(submit(r));
  std::vector<Answer> answers;
  for (const uint64_t id : ids) answers.push_back(wait(id));
  return answers;
}

int64_t TestEngine::preemptions() const {
  int64_t sum = 0;
  for (const RankStats& s : engine->stats()) sum += s.preemptions;
  return sum;
}

}  // namespace sortie::engine
