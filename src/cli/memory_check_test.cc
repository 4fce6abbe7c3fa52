#include "cli/memory_check.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "base/fork_test_util.h"
#include "cli/process_test_util.h"
#include "cli/shapes.h"
#include "model/random_checkpoint.h"

namespace sortie::cli {
namespace {

// A model of about 200 MB in bf16, half of it experts.
model::Config small_shape() {
  model::Config c = *bench_shape("v2-lite");
  c.vocab_size = 8192;
  c.num_hidden_layers = 3;
  c.n_routed_experts = 16;
  c.num_experts_per_tok = 4;
  return c;
}

struct Checkpoint {
  explicit Checkpoint(model::Dialect dialect = model::Dialect::kBf16) {
    const Status s = model::write_random_checkpoint(folder.path(), small_shape(), dialect, 1);
    EXPECT_TRUE(s.is_ok()) << s.message();
  }
  TemporaryFolder folder;
};

// Bytes that a fresh process takes to load the model, fill its cache and run the largest step.
int64_t measured(const RunOptions& options) {
  return in_child([&]() -> int64_t {
    const int64_t before = resident_bytes();
    const auto ranks = Ranks::open(options, {});
    if (!ranks.is_ok()) return -1;
    const Status done = (*ranks)->on_each([&](Rank& rank) {
      rank.model->fill_cache();
      model::Step step;
      const auto rows = static_cast<int32_t>((*ranks)->options().chunked_prefill_size);
      std::vector<int32_t> pages;
      for (int32_t i = 0; i < rows; ++i) {
        step.ids.push_back(i % 8192);
        step.positions.push_back(i);
        if (i % 64 == 0) pages.push_back(i / 64);
      }
      step.segments = {{.first_row = 0, .rows = rows, .prefill = true, .page_table = pages.data()}};
      step.logit_rows = {rows - 1};
      step.any_prefill_anywhere = true;
      return rank.model->forward(step).status();
    });
    return done.is_ok() ? peak_resident_bytes() - before : -1;
  });
}

void expect_predicted(RunOptions options) {
  options.quiet = true;
  options.threads = 1;
  options.max_running_requests = 4;
  options.context_length = 4096;
  options.max_total_tokens = 4096;
  RunOptions resolved = options;
  const auto config = resolve(resolved);
  ASSERT_TRUE(config.is_ok()) << config.status().message();
  const auto load = plan_memory(*config, resolved, nullptr);
  ASSERT_TRUE(load.is_ok()) << load.status().message();
  const int64_t taken = measured(options);
  ASSERT_GT(taken, 0);
  const double ratio = static_cast<double>(load->needs.total()) / static_cast<double>(taken);
  EXPECT_NEAR(ratio, 1, 0.1) << options.quantization << " ep " << options.ep_size << ": "
                             << load->needs.total() << " planned, " << taken << " taken";
}

TEST(MemoryCheck, PredictsWhatALoadTakes) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer's shadow is memory too";
#endif
  const Checkpoint c;
  expect_predicted({.model = c.folder.path()});
  expect_predicted({.model = c.folder.path(), .ep_size = 2});
  expect_predicted({.model = c.folder.path(), .quantization = "w8a8_int8"});
  expect_predicted({.model = c.folder.path(), .quantization = "w4afp8", .dense = "fp8_block"});
  const Checkpoint fp8(model::Dialect::kFp8Block);
  expect_predicted({.model = fp8.folder.path()});
}

struct Planned {
  RunOptions options;
  model::Config config = small_shape();
  HostLoad load;
  explicit Planned(RunOptions o = {}) : options(std::move(o)) {
    options.ep_size = std::max(1, options.ep_size);
    options.max_running_requests = 4;
    options.context_length = 4096;
    options.decode_segment = 256;
    options.max_dispatch_tokens = 4;
    if (options.max_total_tokens == 0) options.max_total_tokens = 4096;
    const model::MemoryPlan plan = model::memory_plan(config, {});
    load = host_load(config, options,
                     {.experts = {.made = plan.expert_bytes}, .rest = {.mapped = plan.dense_bytes}},
                     options.ep_size);
  }
  Status check(int64_t free) const {
    return check_fits("m", options, load, {free, "MemAvailable"},
                      other_forms(config, options, options.ep_size));
  }
};

TEST(MemoryCheck, RefusalsSayWhatWouldFit) {
  const Planned p;
  EXPECT_TRUE(p.check(p.load.needs.total()).is_ok());
  const Status cache = p.check(p.load.needs.total() - 1);
  EXPECT_EQ(cache.code(), StatusCode::kExhausted);
  EXPECT_NE(cache.message().find("--max-total-tokens 4032 would fit"), std::string::npos)
      << cache.message();
  const Status weights = p.check(p.load.needs.total() - p.load.needs.weights / 3);
  EXPECT_EQ(weights.message().find("--max-total-tokens"), std::string::npos) << weights.message();
  EXPECT_NE(weights.message().find("--quantization w4afp8"), std::string::npos);
  const Status nothing = p.check(1000);
  EXPECT_NE(nothing.message().find("no form of it fits"), std::string::npos) << nothing.message();
}

// Without its own data a process shares the mapped pages and doubles what it makes.
TEST(MemoryCheck, RanksOfAHostAddUp) {
  const model::WeightBytes weights{.experts = {.made = 800}, .rest = {.mapped = 70, .made = 5}};
  RunOptions o = Planned({.ep_size = 4}).options;
  EXPECT_EQ(host_load(small_shape(), o, weights, 4).needs.weights, 800 + 70 + 5);
  o.a2a_backend = "ucx";
  EXPECT_EQ(host_load(small_shape(), o, weights, 4).needs.weights, 800 + 70 + 4 * 5);
  EXPECT_EQ(host_load(small_shape(), o, weights, 2).needs.weights, 400 + 70 + 2 * 5);
}

TEST(MemoryCheck, AbsurdCachesAreTooLarge) {
  const Planned p({.max_total_tokens = std::numeric_limits<int64_t>::max()});
  EXPECT_EQ(p.load.needs.total(), std::numeric_limits<int64_t>::max());
  EXPECT_EQ(p.check(int64_t{1} << 40).code(), StatusCode::kExhausted);
}

TEST(MemoryCheck, FractionSizesTheCache) {
  Planned p;
  p.options.mem_fraction_static = 0.5;
  const int64_t weights = p.load.needs.weights;
  const auto tokens = tokens_by_fraction(p.options, p.load, 2 * weights + 200 * p.load.cache_token);
  ASSERT_TRUE(tokens.is_ok());
  EXPECT_EQ(*tokens, 64);  // 100 would fit, in pages of 64
  EXPECT_EQ(*tokens_by_fraction(p.options, p.load, int64_t{1} << 50), 4 * 4096);
  EXPECT_EQ(tokens_by_fraction(p.options, p.load, weights).status().code(), StatusCode::kExhausted);
}

}  // namespace
}  // namespace sortie::cli
