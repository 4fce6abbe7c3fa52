#include "engine/scheduler.h"

#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <random>
#include <set>

namespace sortie::engine {
namespace {

constexpr int32_t kEos = 1;
constexpr int32_t kVocabulary = 1000;

// What a request's stream has brought.
struct Stream {
  std::vector<int32_t> tokens;
  std::vector<Event> finals;
};

// A scheduler driven by a model that can be checked: the next token is a hash of the latents that
// lie in the request's pages, and a latent is (token, position, path). So a wrong page, a page that
// is shared by mistake, a row that was left out or made by the wrong path changes the output.
class Rig {
 public:
  explicit Rig(SchedulerOptions options)
      : options_(fill(std::move(options))),
        scheduler(options_, [this](const Event& e) { on_event(e); }),
        cache_(static_cast<size_t>(options_.pages * options_.page_size)) {}

  void submit(uint64_t id, std::vector<int32_t> prompt, SamplingParams sampling) {
    scheduler.submit({.id = id, .prompt = std::move(prompt), .sampling = std::move(sampling)});
  }

  const Scheduler::Plan& step() {
    Scheduler::Plan& plan = scheduler.plan();
    run(plan.step);
    std::vector<Sampled> sampled;
    for (size_t i = 0; i < plan.targets.size(); ++i) {
      EXPECT_EQ(plan.step.logit_rows[i], target_rows_[i]);
      sampled.push_back({.id = answers_[i]});
    }
    EXPECT_EQ(plan.targets.size(), plan.step.logit_rows.size());
    EXPECT_LE(plan.prefill_rows, options_.chunked_prefill_size);
    EXPECT_LE(plan.decode_rows, options_.max_running_requests);
    EXPECT_EQ(plan.prefill_rows + plan.decode_rows, static_cast<int32_t>(plan.step.ids.size()));
    scheduler.apply(sampled);
    return plan;
  }

  void run_all() {
    for (int i = 0; i < 100000 && !scheduler.idle(); ++i) step();
    EXPECT_TRUE(scheduler.idle());
    EXPECT_EQ(scheduler.free_pages(), options_.pages);
  }

  const Stream& operator[](uint64_t id) { return streams_[id]; }

 private:
  struct Latent {
    int32_t token = -1;
    int32_t position = -1;
    bool prefill = false;
  };

  static SchedulerOptions fill(SchedulerOptions o) {
    if (o.context_length == 0) o.context_length = 1000;
    if (o.pages == 0) o.pages = 100;
    o.vocab_size = kVocabulary;
    o.eos_token_ids = {kEos};
    return o;
  }

  void on_event(const Event& e) {
    Stream& s = streams_[e.request];
    EXPECT_TRUE(s.finals.empty()) << "an event after the last";
    if (e.token >= 0) s.tokens.push_back(e.token);
    if (e.finish != FinishReason::kNone) s.finals.push_back(e);
  }

  Latent& latent(const model::Segment& s, int32_t position) {
    const int64_t page = s.page_table[position / options_.page_size];
    return cache_[static_cast<size_t>(page * options_.page_size + position % options_.page_size)];
  }

  void run(const model::Step& step) {
    target_rows_.clear();
    answers_.clear();
    int64_t row = 0;
    for (const model::Segment& s : step.segments) {
      EXPECT_EQ(s.first_row, row);
      for (int64_t i = 0; i < s.rows; ++i, ++row) {
        const int32_t position = step.positions[static_cast<size_t>(row)];
        latent(s, position) = {step.ids[static_cast<size_t>(row)], position, s.prefill};
      }
    }
    EXPECT_EQ(row, static_cast<int64_t>(step.ids.size()));
    for (const model::Segment& s : step.segments) {
      const auto last = static_cast<int32_t>(s.first_row + s.rows - 1);
      if (std::find(step.logit_rows.begin(), step.logit_rows.end(), last) == step.logit_rows.end())
        continue;
      uint64_t hash = 1469598103934665603u;
      const int32_t end = step.positions[static_cast<size_t>(last)];
      for (int32_t p = 0; p <= end; ++p) {
        const Latent& l = latent(s, p);
        EXPECT_EQ(l.position, p);
        hash = (hash ^ static_cast<uint64_t>(l.token * 2 + (l.prefill ? 1 : 0))) * 1099511628211u;
      }
      target_rows_.push_back(last);
      answers_.push_back(static_cast<int32_t>(2 + (hash >> 20) % (kVocabulary - 2)));
    }
  }

  const SchedulerOptions options_;
  std::map<uint64_t, Stream> streams_;

 public:
  Scheduler scheduler;

 private:
  std::vector<Latent> cache_;
  std::vector<int32_t> target_rows_;
  std::vector<int32_t> answers_;
};

std::vector<int32_t> prompt_of(int32_t tokens, int32_t first = 2) {
  std::vector<int32_t> p;
  for (int32_t i = 0; i < tokens; ++i) p.push_back((first + i * 7) % kVocabulary);
  return p;
}

TEST(Scheduler, CutsAPromptIntoChunksAndSharesThem) {
  Rig rig({.chunked_prefill_size = 8});
  rig.submit(1, prompt_of(12), {.max_new_tokens = 3});
  rig.submit(2, prompt_of(3), {.max_new_tokens = 3});
  const Scheduler::Plan& plan = rig.step();
  EXPECT_EQ(plan.prefill_rows, 8);
  EXPECT_EQ(plan.step.segments.size(), 1u);
  EXPECT_TRUE(plan.targets.empty());
  rig.step();  // 4 rows of the first, all 3 of the second
  EXPECT_EQ(plan.prefill_rows, 7);
  EXPECT_EQ(plan.targets.size(), 2u);
  EXPECT_EQ(rig[1].tokens.size(), 1u);
  rig.step();
  EXPECT_EQ(plan.prefill_rows, 0);
  EXPECT_EQ(plan.decode_rows, 2);
  EXPECT_FALSE(plan.step.segments[0].prefill);
  rig.run_all();
  EXPECT_EQ(rig[1].tokens.size(), 3u);
  ASSERT_EQ(rig[2].finals.size(), 1u);
  EXPECT_EQ(rig[2].finals[0].finish, FinishReason::kLength);
  EXPECT_EQ(rig[2].finals[0].prompt_tokens, 3);
  EXPECT_EQ(rig[2].finals[0].generated_tokens, 3);
}

TEST(Scheduler, ServesDecodeRowsBesidePromptChunks) {
  Rig rig({.chunked_prefill_size = 4});
  rig.submit(1, prompt_of(2), {.max_new_tokens = 20});
  rig.step();
  rig.submit(2, prompt_of(9), {.max_new_tokens = 2});
  const Scheduler::Plan& plan = rig.step();
  EXPECT_EQ(plan.decode_rows, 1);
  EXPECT_EQ(plan.prefill_rows, 4);
  rig.run_all();
}

TEST(Scheduler, RunsNoMoreRequestsThanAllowedFirstComeFirstServed) {
  Rig rig({.max_running_requests = 2, .chunked_prefill_size = 100});
  for (uint64_t id = 1; id <= 5; ++id) rig.submit(id, prompt_of(4), {.max_new_tokens = 2});
  rig.step();
  EXPECT_EQ(rig.scheduler.running(), 2u);
  EXPECT_EQ(rig.scheduler.waiting(), 3u);
  rig.step();  // 1 and 2 end
  rig.step();
  EXPECT_EQ(rig[3].tokens.size(), 1u);
  EXPECT_EQ(rig[4].tokens.size(), 1u);
  EXPECT_TRUE(rig[5].tokens.empty());
  rig.run_all();
  EXPECT_EQ(rig[5].tokens.size(), 2u);
}

TEST(Scheduler, KeepsAStepWithinWhatTheExchangeTakes) {
  Rig rig({.max_running_requests = 4, .chunked_prefill_size = 16, .max_step_rows = 6});
  for (uint64_t id = 1; id <= 4; ++id)
    rig.submit(id, prompt_of(11, static_cast<int32_t>(id)), {.max_new_tokens = 10});
  while (!rig.scheduler.idle()) EXPECT_LE(rig.step().step.ids.size(), 6u);
}

TEST(Scheduler, RefusesAtOnceWhatCanNeverFit) {
  Rig rig({.context_length = 20, .page_size = 4, .pages = 4});
  rig.submit(1, prompt_of(20), {});
  rig.submit(2, prompt_of(17), {});
  rig.submit(3, {}, {});
  rig.submit(4, {5, kVocabulary}, {});
  rig.submit(5, {-1}, {});
  EXPECT_TRUE(rig.scheduler.idle());
  const auto error = [&](uint64_t id) {
    EXPECT_EQ(rig[id].finals.size(), 1u);
    EXPECT_EQ(rig[id].finals[0].finish, FinishReason::kError);
    return rig[id].finals[0].error;
  };
  EXPECT_EQ(error(1),
            "the prompt has 20 tokens, but with --context-length 20 it may have 19: shorten it or "
            "raise --context-length");
  EXPECT_EQ(error(2),
            "the prompt has 17 tokens and needs 5 cache pages of 4, but a rank has 4: shorten it "
            "or give the cache more memory");
  EXPECT_EQ(error(3), "the prompt has no tokens: give at least one");
  EXPECT_EQ(error(4), "token 1 of the prompt is 1000, but ids go from 0 to 999");
  EXPECT_EQ(error(5), "token 0 of the prompt is -1, but ids go from 0 to 999");
}

TEST(Scheduler, RefusesSamplingParametersThatMeanNothing) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<SamplingParams> bad = {{.max_new_tokens = -1},
                                           {.temperature = -1},
                                           {.temperature = nan},
                                           {.temperature = infinity},
                                           {.top_p = 0},
                                           {.top_p = 1.5F},
                                           {.top_p = nan},
                                           {.top_k = -2},
                                           {.min_p = -0.1F},
                                           {.min_p = nan},
                                           {.repetition_penalty = 0},
                                           {.repetition_penalty = nan},
                                           {.presence_penalty = nan},
                                           {.frequency_penalty = nan},
                                           {.top_logprobs = -1},
                                           {.top_logprobs = kVocabulary + 1}};
  Rig rig({});
  for (size_t i = 0; i < bad.size(); ++i) {
    rig.submit(i, {5}, bad[i]);
    ASSERT_EQ(rig[i].finals.size(), 1u) << i;
    EXPECT_EQ(rig[i].finals[0].finish, FinishReason::kError) << i;
    EXPECT_FALSE(rig[i].finals[0].error.empty()) << i;
  }
}

TEST(Scheduler, CutsTheOutputToTheRoomLeft) {
  Rig context({.context_length = 20});
  context.submit(1, prompt_of(15), {.max_new_tokens = 1000});
  context.run_all();
  EXPECT_EQ(context[1].tokens.size(), 5u);
  EXPECT_EQ(context[1].finals[0].finish, FinishReason::kLength);

  Rig pages({.page_size = 4, .pages = 4});  // 16 latents, and the last token needs none
  pages.submit(1, prompt_of(15), {.max_new_tokens = 1000});
  pages.submit(2, prompt_of(16), {.max_new_tokens = 1000});
  pages.run_all();
  EXPECT_EQ(pages[1].tokens.size(), 2u);
  EXPECT_EQ(pages[2].tokens.size(), 1u);
}

TEST(Scheduler, NoNewTokensIsALengthWithoutAToken) {
  Rig rig({});
  rig.submit(1, prompt_of(3), {.max_new_tokens = 0});
  EXPECT_TRUE(rig.scheduler.idle());
  EXPECT_TRUE(rig[1].tokens.empty());
  ASSERT_EQ(rig[1].finals.size(), 1u);
  EXPECT_EQ(rig[1].finals[0].finish, FinishReason::kLength);
}

TEST(Scheduler, StopTokensEndARequestAndAreNotEmitted) {
  const auto run = [](SamplingParams sampling, std::vector<int32_t> answers) {
    Stream out;
    Scheduler s({.context_length = 100, .pages = 4, .vocab_size = 50, .eos_token_ids = {kEos, 9}},
                [&](const Event& e) {
                  if (e.token >= 0) out.tokens.push_back(e.token);
                  if (e.finish != FinishReason::kNone) out.finals.push_back(e);
                });
    s.submit({.id = 1, .prompt = {3}, .sampling = std::move(sampling)});
    for (const int32_t id : answers) {
      s.plan();
      const Sampled sampled{.id = id, .logprob = -0.5F, .top = {{id, -0.5F}}};
      s.apply({&sampled, 1});
      if (s.idle()) break;
    }
    EXPECT_EQ(out.finals.size(), 1u);
    return out;
  };
  const Stream eos = run({.max_new_tokens = 5}, {7, 9, 8});
  EXPECT_EQ(eos.tokens, (std::vector<int32_t>{7}));
  EXPECT_EQ(eos.finals[0].finish, FinishReason::kStop);
  EXPECT_EQ(eos.finals[0].matched_stop, 9);
  EXPECT_EQ(eos.finals[0].generated_tokens, 2);
  EXPECT_EQ(eos.finals[0].logprob, -0.5F);
  EXPECT_EQ(eos.finals[0].top.size(), 1u);

  const Stream ignored = run({.max_new_tokens = 3, .ignore_eos = true}, {7, 9, kEos});
  EXPECT_EQ(ignored.tokens, (std::vector<int32_t>{7, 9, kEos}));
  EXPECT_EQ(ignored.finals[0].finish, FinishReason::kLength);

  const Stream named =
      run({.max_new_tokens = 3, .ignore_eos = true, .stop_token_ids = {8}}, {9, 8});
  EXPECT_EQ(named.tokens, (std::vector<int32_t>{9}));
  EXPECT_EQ(named.finals[0].matched_stop, 8);
}

TEST(Scheduler, CancelsInEveryState) {
  Rig rig({.max_running_requests = 2, .chunked_prefill_size = 4, .page_size = 4, .pages = 20});
  rig.submit(1, prompt_of(2), {.max_new_tokens = 50});   // decodes
  rig.submit(2, prompt_of(40), {.max_new_tokens = 50});  // amid its prompt
  rig.submit(3, prompt_of(4), {.max_new_tokens = 50});   // waits
  for (int i = 0; i < 3; ++i) rig.step();
  for (const uint64_t id : {3, 2, 1, 1, 77}) rig.scheduler.cancel(id);
  EXPECT_TRUE(rig.scheduler.idle());
  EXPECT_EQ(rig.scheduler.free_pages(), 20);
  for (const uint64_t id : {1, 2, 3}) {
    ASSERT_EQ(rig[id].finals.size(), 1u);
    EXPECT_EQ(rig[id].finals[0].finish, FinishReason::kCancelled);
  }
  EXPECT_EQ(rig[1].finals[0].generated_tokens, static_cast<int64_t>(rig[1].tokens.size()));
  EXPECT_TRUE(rig[77].finals.empty());
}

TEST(Scheduler, CancelsAPreemptedRequest) {
  Rig rig({.page_size = 2, .pages = 8});
  rig.submit(1, prompt_of(4), {.max_new_tokens = 12});
  rig.submit(2, prompt_of(4), {.max_new_tokens = 12});
  while (rig.scheduler.preemptions() == 0) rig.step();
  EXPECT_EQ(rig.scheduler.waiting(), 1u);
  const size_t emitted = rig[2].tokens.size();
  EXPECT_GT(emitted, 0u);
  rig.scheduler.cancel(2);
  rig.run_all();
  EXPECT_EQ(rig[2].tokens.size(), emitted);
  EXPECT_EQ(rig[2].finals[0].finish, FinishReason::kCancelled);
  EXPECT_EQ(rig[1].tokens.size(), 12u);
}

TEST(Scheduler, APlanMayBeDropped) {
  Rig a({.chunked_prefill_size = 3});
  Rig b({.chunked_prefill_size = 3});
  for (Rig* rig : {&a, &b}) {
    rig->submit(1, prompt_of(7), {.max_new_tokens = 6});
    rig->submit(2, prompt_of(2), {.max_new_tokens = 6});
  }
  while (!b.scheduler.idle()) {
    b.scheduler.plan();
    b.step();
  }
  a.run_all();
  EXPECT_EQ(a[1].tokens, b[1].tokens);
  EXPECT_EQ(a[2].tokens, b[2].tokens);
}

TEST(Scheduler, EndsAllWithTheReasonGiven) {
  Rig rig({.max_running_requests = 1});
  rig.submit(1, prompt_of(2), {});
  rig.submit(2, prompt_of(2), {});
  rig.step();
  rig.scheduler.end_all(FinishReason::kRankLost, "rank 1 is gone");
  for (const uint64_t id : {1, 2}) {
    ASSERT_EQ(rig[id].finals.size(), 1u);
    EXPECT_EQ(rig[id].finals[0].finish, FinishReason::kRankLost);
    EXPECT_EQ(rig[id].finals[0].error, "rank 1 is gone");
  }
  EXPECT_EQ(rig.scheduler.free_pages(), 100);
}

TEST(Scheduler, PreemptsTheLatestAndResumesItAsDecodeRows) {
  Rig rig({.page_size = 2, .pages = 8});
  rig.submit(1, prompt_of(4), {.max_new_tokens = 12});
  rig.submit(2, prompt_of(4), {.max_new_tokens = 12});
  while (rig.scheduler.preemptions() == 0) rig.step();
  EXPECT_TRUE(rig[1].finals.empty());
  EXPECT_EQ(rig.scheduler.running(), 1u);
  const auto generated = static_cast<int64_t>(rig[2].tokens.size());
  ASSERT_GT(generated, 2);
  while (rig[1].finals.empty()) rig.step();

  const Scheduler::Plan& prompt = rig.step();
  ASSERT_EQ(prompt.step.segments.size(), 1u);
  EXPECT_TRUE(prompt.step.segments[0].prefill);
  EXPECT_EQ(prompt.prefill_rows, 4);
  EXPECT_TRUE(prompt.targets.empty()) << "the token after the prompt is known";
  const Scheduler::Plan& output = rig.step();
  ASSERT_EQ(output.step.segments.size(), 1u);
  EXPECT_FALSE(output.step.segments[0].prefill);
  EXPECT_EQ(output.step.segments[0].rows, generated);
  EXPECT_EQ(output.prefill_rows, generated);
  rig.run_all();
  EXPECT_EQ(rig[2].tokens.size(), 12u);
}

// The heart of it: whatever the pages, the chunks and the company, a request's stream is the same.
TEST(Scheduler, AStreamDependsOnNothingButItsRequest) {
  std::mt19937 random(7);
  const auto pick = [&](int lo, int hi) { return std::uniform_int_distribution(lo, hi)(random); };
  int64_t preemptions = 0;
  for (int round = 0; round < 60; ++round) {
    std::vector<std::pair<int32_t, int64_t>> requests;  // prompt and output tokens
    for (int i = 0; i < 12; ++i) requests.emplace_back(pick(1, 30), pick(1, 20));
    Rig together({.max_running_requests = pick(1, 12),
                  .chunked_prefill_size = pick(1, 40),
                  .page_size = pick(1, 5),
                  .pages = 50 + pick(0, 30)});
    Rig alone({.pages = 1000});
    size_t next = 0;
    while (next < requests.size() || !together.scheduler.idle()) {
      if (next < requests.size() && pick(0, 1) == 0) {
        const auto [prompt, output] = requests[next];
        together.submit(next, prompt_of(prompt, static_cast<int32_t>(next)),
                        {.max_new_tokens = output});
        ++next;
      }
      together.step();
    }
    preemptions += together.scheduler.preemptions();
    for (size_t id = 0; id < requests.size(); ++id) {
      const auto [prompt, output] = requests[id];
      alone.submit(id, prompt_of(prompt, static_cast<int32_t>(id)), {.max_new_tokens = output});
      alone.run_all();
      EXPECT_EQ(together[id].tokens, alone[id].tokens) << "round " << round << " request " << id;
      EXPECT_EQ(together[id].finals.size(), 1u);
    }
  }
  EXPECT_GT(preemptions, 20);
}

}  // namespace
}  // namespace sortie::engine
