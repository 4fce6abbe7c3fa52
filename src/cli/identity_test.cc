// Bit-identical logits: a sequence's numbers do not depend on the batch, the ranks, the threads,
// the exchange mode or the way its prompt was cut (docs/numerics.md). Compared as bits, within one
// ISA.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "backends/cpu/isa.h"
#include "cli/process_test_util.h"
#include "cli/ranks.h"
#include "cli/sequence.h"
#include "model/dialect_test_util.h"

namespace sortie::cli {
namespace {

constexpr int kPrompts = 12;
constexpr size_t kForced = 4;  // decode rows after each prompt

// What a scenario may change. The probe is prompt 0, on rank 0.
struct Scenario {
  std::string name;
  int ranks = 1;
  int threads = 1;
  int batch = 1;      // prompts on rank 0
  int elsewhere = 0;  // prompts on each other rank
  size_t chunk = 1000;
  std::string mode = "auto";
  bool one_by_one = true;  // decode rows one a step, or all in one step
};

std::vector<int32_t> tokens(int prompt, size_t count, int64_t vocab) {
  std::mt19937 random(static_cast<unsigned>(prompt) + 1);
  std::uniform_int_distribution<int32_t> id(0, static_cast<int32_t>(vocab) - 1);
  std::vector<int32_t> ids(count);
  for (int32_t& i : ids) i = id(random);
  return ids;
}

// One prompt on its way through the steps.
struct Running {
  std::vector<int32_t> ids;  // prompt and forced continuation
  size_t prompt;
  Sequence sequence;
  size_t done = 0;

  size_t next(const Scenario& s) const {
    if (done < prompt) return std::min(s.chunk, prompt - done);
    return s.one_by_one ? std::min<size_t>(1, ids.size() - done) : ids.size() - done;
  }
};

// The probe's logits: the prompt's last row and every forced row. A folder with "+bf16_cache"
// behind it has its latents in bf16.
std::vector<float> probe_logits(const std::string& folder, const Scenario& s,
                                const std::string& device) {
  RunOptions o;
  o.model = folder.substr(0, folder.find('+'));
  if (o.model != folder) o.kv_cache_dtype = "bf16";
  o.device = device;
  o.ep_size = s.ranks;
  o.threads = s.threads;
  o.deepep_mode = s.mode;
  o.context_length = 128;
  o.max_running_requests = kPrompts * static_cast<int>(kForced);
  o.chunked_prefill_size = kPrompts * 64;
  o.max_total_tokens = kPrompts * 128;
  o.page_size = 16;
  o.quiet = true;
  auto ranks = Ranks::open(o, {});
  EXPECT_TRUE(ranks.is_ok()) << ranks.status().message();
  if (!ranks.is_ok()) return {};
  const int64_t vocab = (*ranks)->config().vocab_size;

  // Every rank knows every rank's plan, as headers would tell it.
  std::vector<std::vector<Running>> plan(static_cast<size_t>(s.ranks));
  for (int r = 0; r < s.ranks; ++r) {
    for (int i = 0; i < (r == 0 ? s.batch : s.elsewhere); ++i) {
      const int prompt = r == 0 ? i : kPrompts * r + i;
      const auto length = static_cast<size_t>(20 + prompt * 7 % 37);
      plan[static_cast<size_t>(r)].push_back(
          {tokens(prompt, length + kForced, vocab), length, Sequence(i * 8, 128, o.page_size)});
    }
  }
  std::vector<std::vector<bool>> prefill;  // [step] whether any rank has a prompt chunk
  std::vector<std::vector<std::vector<size_t>>> rows(static_cast<size_t>(s.ranks));
  bool any = true;
  for (auto counting = plan; any;) {
    any = false;
    bool chunk = false;
    for (size_t r = 0; r < counting.size(); ++r) {
      auto& step = rows[r].emplace_back();
      for (Running& run : counting[r]) {
        step.push_back(run.next(s));
        chunk = chunk || (step.back() > 0 && run.done < run.prompt);
        run.done += step.back();
        any = any || step.back() > 0;
      }
    }
    prefill.push_back({chunk});
  }

  std::vector<float> logits;
  const Status status = (*ranks)->on_each([&](Rank& rank) -> Status {
    auto& running = plan[static_cast<size_t>(rank.index)];
    for (size_t n = 0; n < prefill.size(); ++n) {
      model::Step step;
      for (size_t i = 0; i < running.size(); ++i) {
        Running& run = running[i];
        const size_t count = rows[static_cast<size_t>(rank.index)][n][i];
        if (count == 0) continue;
        run.sequence.append(step, std::span<const int32_t>(run.ids).subspan(run.done, count),
                            run.done < run.prompt, run.done >= run.prompt);
        run.done += count;
      }
      step.any_prefill_anywhere = prefill[n][0];
      const bool probe =
          rank.index == 0 && rows[0][n][0] > 0 && running[0].done >= running[0].prompt;
      const size_t count =
          running.empty() ? 0 : (running[0].done > running[0].prompt ? rows[0][n][0] : 1);
      auto output = rank.model->forward(step);
      if (!output.is_ok()) return output.status();
      if (probe) {
        logits.insert(logits.end(), output->logits,
                      output->logits + static_cast<int64_t>(count) * vocab);
      }
    }
    return Status::ok();
  });
  EXPECT_TRUE(status.is_ok()) << s.name << ": " << status.message();
  EXPECT_EQ(logits.size(), (1 + kForced) * static_cast<size_t>(vocab)) << s.name;
  return logits;
}

const Scenario kScenarios[] = {
    {.name = "2 threads", .threads = 2},
    {.name = "3 threads", .threads = 3},
    {.name = "batch of 12", .batch = 12},
    {.name = "batch of 12, 2 threads", .threads = 2, .batch = 12},
    {.name = "chunks of 1", .chunk = 1},
    {.name = "chunks of 7 in a batch", .batch = 5, .chunk = 7},
    {.name = "decode rows in one step", .batch = 3, .one_by_one = false},
    {.name = "2 ranks", .ranks = 2},
    {.name = "2 ranks, the other busy", .ranks = 2, .batch = 4, .elsewhere = 5},
    {.name = "4 ranks, chunks of 5", .ranks = 4, .batch = 2, .elsewhere = 3, .chunk = 5},
    {.name = "8 ranks", .ranks = 8, .batch = 2, .elsewhere = 1},
    {.name = "2 ranks, low_latency", .ranks = 2, .batch = 3, .elsewhere = 2, .mode = "low_latency"},
    {.name = "2 ranks, normal", .ranks = 2, .batch = 3, .elsewhere = 2, .mode = "normal"},
};

// Folder of tests/data, and an instruction set or "reference".
class Identity : public testing::TestWithParam<std::tuple<std::string, std::string>> {
 protected:
  void TearDown() override { unsetenv("SORTIE_ISA"); }
};

TEST_P(Identity, LogitsAreTheSameBits) {
  const auto& [name, isa] = GetParam();
  const std::string folder = SORTIE_SOURCE_DIR "/tests/data/" + name;
  const std::string device = isa == "reference" ? "reference" : "cpu";
  setenv("SORTIE_ISA", device == "cpu" ? isa.c_str() : "generic", 1);
  const Result<cpu::Isa> chosen = cpu::choose_isa();
  if (!chosen.is_ok()) GTEST_SKIP() << chosen.status().message();
  const std::vector<float> alone = probe_logits(folder, {.name = "alone"}, device);
  ASSERT_FALSE(alone.empty());
  const bool short_form = std::getenv("SORTIE_TEST_SHORT") != nullptr;
  for (const Scenario& s : kScenarios) {
    // Sanitizers look for other faults: every fourth scenario will do for them.
    if (short_form && (&s - kScenarios) % 4 != 3) continue;
    if (device == "reference" && (s.threads > 1 || s.ranks > 4)) continue;
    const std::vector<float> logits = probe_logits(folder, s, device);
    ASSERT_EQ(logits.size(), alone.size()) << s.name;
    EXPECT_EQ(std::memcmp(logits.data(), alone.data(), alone.size() * sizeof(float)), 0) << s.name;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Formats, Identity,
    testing::Combine(testing::Values("formats/bf16", "formats/fp8_block", "formats/w4afp8",
                                     "formats/w8a8_compressed_tensors", "tiny/v3-yarn",
                                     "tiny/v2-lite", "tiny/v2-group", "formats/w4afp8+bf16_cache",
                                     "tiny/v2-lite+bf16_cache"),
                     testing::ValuesIn(all_devices())),
    [](const auto& info) {
      std::string name = std::get<0>(info.param) + "_" + std::get<1>(info.param);
      for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
      return name;
    });

// How far an instruction set's logits may lie from the reference's, relative to their norm: fp32
// sums in another order, and where activations are quantised per token one code that falls on the
// other side of a half, which moves this small model's logits by 3 to 6 %. A tensor that is read
// wrongly moves them by about their own size.
double dialect_tolerance(model::TestDialect d) {
  return d == model::TestDialect::kBf16 ? 1e-5 : 1e-1;
}

double relative_distance(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0;
  double norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(double{a[i]} - b[i], 2);
    norm += std::pow(double{b[i]}, 2);
  }
  return std::sqrt(difference / norm);
}

// Every dialect on every instruction set with 1, 2 and 4 ranks.
class Dialects : public testing::TestWithParam<model::TestDialect> {
 protected:
  void TearDown() override { unsetenv("SORTIE_ISA"); }
};

TEST_P(Dialects, SameBitsOnAnyRanksAndNearTheReference) {
  const TemporaryFolder folder;
  model::write_test_dialect(GetParam(), folder.path());
  const Scenario alone{.name = "1 rank"};
  const std::vector<float> expected = probe_logits(folder.path(), alone, "reference");
  ASSERT_FALSE(expected.empty());
  double worst = 0;
  for (const cpu::Isa isa : cpu::available_isas()) {
    SCOPED_TRACE(cpu::isa_name(isa));
    setenv("SORTIE_ISA", std::string(cpu::isa_name(isa)).c_str(), 1);
    const std::vector<float> logits = probe_logits(folder.path(), alone, "cpu");
    ASSERT_EQ(logits.size(), expected.size());
    worst = std::max(worst, relative_distance(logits, expected));
    for (const int ranks : {2, 4}) {
      const Scenario spread{
          .name = std::to_string(ranks) + " ranks", .ranks = ranks, .batch = 2, .elsewhere = 1};
      const std::vector<float> other = probe_logits(folder.path(), spread, "cpu");
      ASSERT_EQ(other.size(), logits.size()) << spread.name;
      EXPECT_EQ(std::memcmp(other.data(), logits.data(), logits.size() * sizeof(float)), 0)
          << spread.name;
    }
  }
  RecordProperty("distance", std::to_string(worst));
  EXPECT_LE(worst, dialect_tolerance(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(All, Dialects, testing::ValuesIn(model::kTestDialects),
                         [](const auto& info) { return model::test_dialect_name(info.param); });

}  // namespace
}  // namespace sortie::cli
