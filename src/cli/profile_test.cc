#include "cli/profile.h"

#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "cli/process_test_util.h"

namespace sortie::cli {
namespace {

const std::string kMini = SORTIE_SOURCE_DIR "/models/mini";

TEST(ClockOffset, TheFastestAnswerCounts) {
  ClockOffset offset;
  offset.add({.here = 1000, .there = 9'000'900}, 5000);      // late on the way back
  offset.add({.here = 10'000, .there = 9'010'100}, 10'200);  // 9,000,000 ahead, within 100
  offset.add({.here = 20'000, .there = 9'029'000}, 30'000);
  EXPECT_EQ(offset.value(), 9'000'000);
  EXPECT_EQ(offset.count(), 3);
}

TEST(ClockOffset, WithinItsErrorThereIsNone) {
  ClockOffset offset;
  offset.add({.here = 1000, .there = 1090}, 1100);
  EXPECT_EQ(offset.value(), 0);
}

TEST(Timeline, KeepsTheNewest) {
  model::Timeline timeline;
  const TimePoint t{};
  for (size_t i = 0; i < model::Timeline::kCapacity + 3; ++i) {
    timeline.add(model::StepTimes::kRoute, static_cast<int64_t>(i % 1000), t + Duration(i),
                 t + Duration(i + 1));
  }
  const RankTimeline kept = timeline_of(1, timeline, 5);
  EXPECT_EQ(kept.dropped, 3);
  ASSERT_EQ(kept.events.size(), model::Timeline::kCapacity);
  EXPECT_EQ(kept.events.front().begin, 3);
  EXPECT_EQ(kept.events.back().end, static_cast<int64_t>(model::Timeline::kCapacity) + 3);
  const RankTimeline sent = decode_timeline(1, encode_timeline(kept));
  EXPECT_EQ(sent.events.size(), kept.events.size());
  EXPECT_EQ(sent.dropped, 3);
  EXPECT_EQ(sent.to_front_ns, 5);
}

TEST(Timeline, MessagesThatLieHoldNothing) {
  const std::vector<std::byte> odd(17, std::byte{1});
  EXPECT_TRUE(decode_timeline(0, odd).events.empty());
  EXPECT_TRUE(decode_timeline(0, {}).events.empty());
  const std::vector<std::byte> junk(16 + sizeof(model::Timeline::Event), std::byte{0xff});
  EXPECT_TRUE(decode_timeline(0, junk).events.empty());
}

std::vector<int> ranks_of(const std::vector<RankTimeline>& timelines) {
  std::vector<int> ranks;
  for (const RankTimeline& t : timelines) ranks.push_back(t.rank);
  return ranks;
}

// A rank that sent its timeline and closed is one rank, not two.
TEST(TimelineInbox, WaitsForTheLastAlthoughTheFirstHaveClosed) {
  TimelineInbox inbox;
  inbox.put({.rank = 2});
  inbox.put({.rank = 1});
  std::thread last([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    inbox.put({.rank = 3});
  });
  const auto closed = [](int rank) { return rank < 3; };
  EXPECT_EQ(ranks_of(inbox.take(1, 4, closed, seconds(60))), (std::vector<int>{1, 2, 3}));
  last.join();
}

TEST(TimelineInbox, WaitsForNobodyWhoIsGoneNorForever) {
  TimelineInbox inbox;
  inbox.put({.rank = 2, .dropped = 7});
  inbox.put({.rank = 2});
  const auto only = inbox.take(
      1, 3, [](int rank) { return rank == 1; }, seconds(3600));
  ASSERT_EQ(ranks_of(only), std::vector<int>{2});
  EXPECT_EQ(only[0].dropped, 7);
  EXPECT_TRUE(inbox
                  .take(
                      1, 3, [](int) { return false; }, seconds(0.01))
                  .empty());
}

struct Span {
  std::string name;
  int64_t step;
  int64_t layer;
  double begin;
  double end;
};

std::map<int, std::vector<Span>> read_trace(const std::string& path) {
  std::map<int, std::vector<Span>> ranks;
  std::ifstream file(path);
  const auto json = nlohmann::json::parse(file, nullptr, false);
  EXPECT_FALSE(json.is_discarded()) << path;
  if (json.is_discarded()) return ranks;
  for (const auto& e : json["traceEvents"]) {
    if (e["ph"] != "X") continue;
    const double begin = e["ts"].get<double>();
    ranks[e["pid"].get<int>()].push_back(
        {e["name"].get<std::string>(), e["args"]["step"].get<int64_t>(),
         e["args"].value("layer", int64_t{-1}), begin, begin + e["dur"].get<double>()});
  }
  return ranks;
}

constexpr double kRounding = 0.002;  // us: three digits are written

// Laps follow each other, and their step holds them.
void expect_nested(const std::vector<Span>& spans) {
  double end = 0;
  double first = -1;
  for (const Span& s : spans) {
    if (s.name == "step") {
      EXPECT_NEAR(s.begin, first, kRounding);
      EXPECT_NEAR(s.end, end, kRounding);
      first = -1;
      continue;
    }
    if (first < 0) first = s.begin;
    EXPECT_GE(s.begin, end - kRounding) << s.name;
    EXPECT_GE(s.end, s.begin);
    end = s.end;
  }
}

// By step and layer.
std::map<std::pair<int64_t, int64_t>, Span> all_of(const std::vector<Span>& spans,
                                                   const std::string& name) {
  std::map<std::pair<int64_t, int64_t>, Span> found;
  for (const Span& s : spans) {
    if (s.name == name) found[{s.step, s.layer}] = s;
  }
  return found;
}

std::vector<std::string> run_of(int ranks, const std::string& backend) {
  return {"run",
          kMini,
          "-p",
          "Tom has 3 apples.",
          "--quiet",
          "--ep-size",
          std::to_string(ranks),
          "--moe-a2a-backend",
          backend,
          "--threads",
          "1",
          "--max-new-tokens",
          "6"};
}

std::vector<std::string> with_profile(std::vector<std::string> run, const std::string& file) {
  run.insert(run.end(), {"--profile", file});
  return run;
}

void expect_timeline(const std::string& backend) {
  const TemporaryFolder folder;
  const std::string file = folder / "trace.json";
  const Finished plain = run_sortie(run_of(2, backend));
  const Finished finished = run_sortie(with_profile(run_of(2, backend), file));
  ASSERT_EQ(finished.code, 0) << finished.err;
  EXPECT_EQ(finished.out, plain.out);
  const auto ranks = read_trace(file);
  ASSERT_EQ(ranks.size(), 2u);
  for (const auto& [rank, spans] : ranks) {
    SCOPED_TRACE("rank " + std::to_string(rank));
    expect_nested(spans);
    const auto dispatched = all_of(spans, "dispatch");
    EXPECT_GE(dispatched.size(), 6u);
    for (const char* name : {"route", "GEMM 1", "swiglu", "GEMM 2", "reduce", "combine"}) {
      EXPECT_EQ(all_of(spans, name).size(), dispatched.size()) << name;
    }
    EXPECT_GE(all_of(spans, "attention").size(), dispatched.size());
    EXPECT_GE(all_of(spans, "sample").size(), 6u);
    // Nobody has all parts of a layer before the other began to send its rows.
    const auto others = all_of(ranks.at(1 - rank), "dispatch");
    ASSERT_EQ(others.size(), dispatched.size());
    for (const auto& [key, combined] : all_of(spans, "combine")) {
      ASSERT_TRUE(others.contains(key));
      EXPECT_GT(combined.end, others.at(key).begin);
    }
  }
}

TEST(Profile, RanksThatAreThreadsOnOneClock) { expect_timeline("local"); }
#if SORTIE_HAS_UCX
TEST(Profile, RanksThatAreProcessesOnOneClock) { expect_timeline("ucx"); }

// They leave one after the other, so that some have closed while others' timelines are still to
// come.
TEST(Profile, NoProcessIsMissing) {
  const TemporaryFolder folder;
  const std::string file = folder / "trace.json";
  const Finished finished = run_sortie(with_profile(run_of(4, "ucx"), file));
  ASSERT_EQ(finished.code, 0) << finished.err;
  const auto ranks = read_trace(file);
  for (int rank = 0; rank < 4; ++rank) EXPECT_TRUE(ranks.contains(rank)) << "rank " << rank;
}
#endif

TEST(Profile, AFileThatCannotBeWrittenIsRefusedBeforeLoading) {
  const Finished finished =
      run_sortie({"run", kMini, "-p", "x", "--profile", "/nowhere/trace.json"});
  EXPECT_EQ(finished.code, 2);
  EXPECT_NE(finished.err.find("--profile /nowhere/trace.json cannot be written: No such file"),
            std::string::npos)
      << finished.err;
  EXPECT_EQ(finished.out, "");
}

}  // namespace
}  // namespace sortie::cli
