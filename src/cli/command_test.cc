// The program as its users meet it: what it prints, how it ends, what it leaves behind.
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <thread>

#include "cli/process_test_util.h"

namespace sortie::cli {
namespace {

namespace fs = std::filesystem;

// Sanitizer runs take the short form of slow tests.
const bool kShort = std::getenv("SORTIE_TEST_SHORT") != nullptr;
const std::string kData = SORTIE_SOURCE_DIR "/tests/data/";
const std::string kMini = SORTIE_SOURCE_DIR "/models/mini";
const std::string kIds = "5,17,300,42,99,7,255,128,31";

void expect_error(const Finished& f, int code, const std::vector<std::string>& words) {
  EXPECT_EQ(f.code, code) << f.err;
  for (const std::string& w : words)
    EXPECT_NE(f.err.find(w), std::string::npos) << "no '" << w << "' in: " << f.err;
  // One sentence: one line, and nothing of it on stdout.
  EXPECT_EQ(std::count(f.err.begin(), f.err.end(), '\n'), 1) << f.err;
  EXPECT_TRUE(f.out.empty()) << f.out;
}

TEST(Command, WrongFlagsNameTheNearest) {
  expect_error(run_sortie({"run", kMini, "--ep-sise", "2"}), 2, {"--ep-sise", "--ep-size"});
  expect_error(run_sortie({"rum"}), 2, {"rum", "run"});
  expect_error(run_sortie({"run"}), 2, {"MODEL"});
  expect_error(run_sortie({}), 2, {"sortie"});
  expect_error(run_sortie({"run", kMini, "--quiet"}), 2, {"-p"});
  expect_error(run_sortie({"run", kMini, "-p", "x", "--ep-size", "3"}), 2,
               {"--ep-size 3", "power of two"});
  expect_error(run_sortie({"run", kMini, "-p", "x", "--ep-size", "64"}), 2, {"16 experts"});
  expect_error(run_sortie({"run", kMini, "-p", "x", "--quantization", "nvfp4"}), 2,
               {"nvfp4", "w4afp8"});
  expect_error(run_sortie({"run", kMini, "-p", "x", "--max-new-tokens", "-1"}), 2,
               {"--max-new-tokens"});
  expect_error(run_sortie({"run", kMini, "-p", "x"}, {"SORTIE_ISA=sse9"}), 2,
               {"SORTIE_ISA", "sse9"});
  expect_error(run_sortie({"run", kMini, "--ids", "", "--quiet"}), 2, {"--ids"});
  expect_error(run_sortie({"run", kMini, "--ids", "5,x", "--quiet"}), 2, {"--ids", "x"});
  expect_error(run_sortie({"run", kMini, "-p", "x", "--temperature", "-1"}), 2,
               {"--temperature", "at least 0"});
  EXPECT_EQ(run_sortie({"--help"}).code, 0);
  EXPECT_EQ(run_sortie({"run", "--help"}).code, 0);
  EXPECT_EQ(run_sortie({"--version"}).out.substr(0, 7), "sortie ");
}

TEST(Command, WrongPathsAreNamed) {
  expect_error(run_sortie({"run", "/no/such/model", "-p", "x"}), 1, {"/no/such/model"});
  expect_error(run_sortie({"eval", "goldens", kMini, "/no/golden.json"}), 2, {"/no/golden.json"});
  expect_error(run_sortie({"eval", "gsm8k", kMini, "--data", "/no/data.jsonl"}), 2,
               {"/no/data.jsonl"});
  expect_error(run_sortie({"quantize", "/no/such/model", "/no/such/out", "--format", "w4afp8"}), 1,
               {"/no/such/model"});
}

// A copy of a small checkpoint that a test may damage.
struct Damaged {
  TemporaryFolder folder;
  std::string file = folder / "model.safetensors";
  Damaged() {
    for (const auto& f : fs::directory_iterator(kData + "formats/bf16")) {
      fs::copy(f.path(), folder / f.path().filename().string());
    }
    fs::permissions(file, fs::perms::owner_all);
  }
};

TEST(Command, TruncatedAndLyingFiles) {
  for (const uintmax_t size : {uintmax_t{0}, uintmax_t{4}, uintmax_t{100}, uintmax_t{500'000}}) {
    Damaged d;
    fs::resize_file(d.file, size);
    expect_error(run_sortie({"run", d.folder.path(), "--ids", kIds, "--quiet"}), 1,
                 {"model.safetensors"});
  }
  Damaged d;
  std::ifstream original(kData + "formats/bf16/config.json");
  std::string config((std::istreambuf_iterator<char>(original)), std::istreambuf_iterator<char>());
  config.replace(config.find("\"hidden_size\": 256"), 18, "\"hidden_size\": -25");
  std::ofstream(d.folder / "config.json") << config;
  expect_error(run_sortie({"run", d.folder.path(), "--ids", kIds, "--quiet"}), 1, {"hidden_size"});
  std::ofstream(d.folder / "config.json") << "{";
  expect_error(run_sortie({"run", d.folder.path(), "--ids", kIds, "--quiet"}), 1, {"config.json"});
}

TEST(Command, PromptsThatDoNotFit) {
  const std::string model = kData + "formats/bf16";
  expect_error(run_sortie({"run", model, "--ids", kIds, "--quiet", "--context-length", "8"}), 1,
               {"9", "8"});
  expect_error(run_sortie({"run", model, "--ids", "5,9999", "--quiet"}), 1, {"9999", "511"});
  expect_error(run_sortie({"run", model, "--ids", "5,-3", "--quiet"}), 1, {"-3"});
  const Finished none =
      run_sortie({"run", model, "--ids", "5", "--quiet", "--max-new-tokens", "0"});
  EXPECT_EQ(none.code, 0) << none.err;
  EXPECT_EQ(none.out, "\n");
  const Finished cut = run_sortie({"run", model, "--ids", kIds, "--quiet", "--context-length", "12",
                                   "--max-new-tokens", "100", "--ignore-eos"});
  EXPECT_EQ(cut.code, 0) << cut.err;
  EXPECT_EQ(std::count(cut.out.begin(), cut.out.end(), ' '), 3) << cut.out;
}

std::string logprobs(std::vector<std::string> more) {
  std::vector<std::string> arguments = {"run",        "--ids",          kIds, "--quiet",
                                        "--logprobs", "--top-logprobs", "20", "--max-new-tokens",
                                        "12",         "--ignore-eos"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  const Finished f = run_sortie(arguments);
  EXPECT_EQ(f.code, 0) << f.err;
  EXPECT_EQ(std::count(f.out.begin(), f.out.end(), '\n'), 13) << f.out;
  return f.out;
}

// Log-probabilities are printed with the 9 digits that tell any two floats apart.
TEST(Command, RanksAsThreadsAndAsProcessesGiveTheSameBits) {
  for (const std::string form : {"bf16", "fp8_block", "w4afp8", "w8a8_compressed_tensors"}) {
    const std::string model = kData + "formats/" + form;
    const std::string alone = logprobs({model});
    EXPECT_EQ(alone, logprobs({model, "--ep-size", "2"})) << form;
#if SORTIE_HAS_UCX
    EXPECT_EQ(alone, logprobs({model, "--ep-size", "2", "--moe-a2a-backend", "ucx"})) << form;
    EXPECT_EQ(alone, logprobs({model, "--ep-size", "4", "--moe-a2a-backend", "ucx", "--deepep-mode",
                               "normal"}))
        << form;
    EXPECT_EQ(alone, logprobs({model, "--ep-size", "4", "--moe-a2a-backend", "ucx", "--deepep-mode",
                               "low_latency"}))
        << form;
#endif
    EXPECT_EQ(alone, logprobs({model, "--threads", "1", "--chunked-prefill-size", "2"})) << form;
  }
}

TEST(Command, QuantizedFolderEqualsQuantisingWhileLoading) {
  const std::string model = kData + "formats/bf16";
  const std::string calibrate = kData + "formats/calibrate.jsonl";
  const std::vector<std::vector<std::string>> forms = {{"w4afp8"},
                                                       {"w4afp8", "--calibrate", calibrate},
                                                       {"w4afp8", "--dense", "fp8_block"},
                                                       {"w8a8_int8"},
                                                       {"fp8_block"}};
  for (const auto& form : forms) {
    TemporaryFolder folder;
    const std::string out = folder / "quantised";
    std::vector<std::string> quantize = {"quantize", model, out, "--quiet", "--format"};
    quantize.insert(quantize.end(), form.begin(), form.end());
    const Finished f = run_sortie(quantize);
    ASSERT_EQ(f.code, 0) << f.err;
    std::vector<std::string> load = {model, "--quantization"};
    load.insert(load.end(), form.begin(), form.end());
    EXPECT_EQ(logprobs({out}), logprobs(load)) << form[0];
    // A second time would overwrite.
    EXPECT_EQ(run_sortie(quantize).code, 2);
    EXPECT_FALSE(fs::exists(out + ".partial"));
  }
}

std::string file_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file) << path;
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// What an independent program published, calibration included, byte for byte.
TEST(Command, QuantizeWritesThePublishedBytes) {
  const std::string model = kData + "formats/bf16";
  TemporaryFolder folder;
  const Finished int4 =
      run_sortie({"quantize", model, folder / "w4afp8", "--format", "w4afp8", "--dense",
                  "fp8_block", "--calibrate", kData + "formats/calibrate.jsonl", "--quiet"});
  ASSERT_EQ(int4.code, 0) << int4.err;
  const Finished fp8 =
      run_sortie({"quantize", model, folder / "fp8_block", "--format", "fp8_block", "--quiet"});
  ASSERT_EQ(fp8.code, 0) << fp8.err;
  for (const std::string form : {"w4afp8", "fp8_block"}) {
    EXPECT_TRUE(file_bytes(folder / (form + "/model.safetensors")) ==
                file_bytes(kData + "formats/" + form + "/model.safetensors"))
        << form;
  }
}

// A MTP layer's experts are calibrated too: by rows whose next token is the text's.
TEST(Command, CalibrationReachesTheMtpLayer) {
  TemporaryFolder folder;
  std::ofstream(folder / "text.jsonl")
      << R"({"text": "Tom has 3 apples and buys 14 more. How many apples does Tom have?"})"
      << "\n"
      << R"({"text": "Samuel has 28 fewer beads than Wendy, who has 53. How many has Samuel?"})";
  const Finished f = run_sortie({"quantize", kMini, folder / "out", "--format", "w4afp8",
                                 "--calibrate", folder / "text.jsonl", "--quiet"});
  ASSERT_EQ(f.code, 0) << f.err;
  if (kShort) return;  // it was written; that it answers is the release build's to show
  const Finished run = run_sortie(
      {"eval", "goldens", folder / "out", kMini + "/golden.json", "--quiet", "--tolerance", "1"});
  EXPECT_EQ(run.code, 0) << run.out << run.err;
}

// Twelve questions through a cache that holds about two of them, so that requests are preempted,
// and through one that holds them all.
TEST(Command, PreemptedRequestsGiveTheSameAnswers) {
  for (const std::string form : {"bf16", "fp8_block", "w4afp8", "w8a8_int8"}) {
    if (kShort && form != "w4afp8") continue;
    TemporaryFolder folder;
    const auto answers = [&](const std::string& cache, const std::string& name) {
      const Finished f = run_sortie({"eval",
                                     "gsm8k",
                                     kMini,
                                     "--data",
                                     kMini + "/eval.jsonl",
                                     "--num-questions",
                                     "12",
                                     "--num-shots",
                                     "1",
                                     "--quantization",
                                     form,
                                     "--page-size",
                                     "16",
                                     "--context-length",
                                     "512",
                                     "--max-total-tokens",
                                     cache,
                                     "--quiet",
                                     "--output",
                                     folder / name});
      EXPECT_EQ(f.code, 0) << f.err;
      return std::pair{file_bytes(folder / name), f.out};
    };
    const auto [roomy, roomy_report] = answers("8192", "roomy");
    const auto [tight, tight_report] = answers("512", "tight");
    EXPECT_EQ(roomy, tight) << form;
    EXPECT_EQ(roomy_report.find("preempt"), std::string::npos) << roomy_report;
    EXPECT_NE(tight_report.find("preempt"), std::string::npos) << form << ": " << tight_report;
  }
}

TEST(Command, CalibrationNeedsAnUnquantisedModel) {
  TemporaryFolder folder;
  const std::string calibrate = kData + "formats/calibrate.jsonl";
  expect_error(run_sortie({"quantize", kData + "formats/fp8_block", folder / "out", "--format",
                           "w4afp8", "--quiet", "--calibrate", calibrate}),
               2, {"--calibrate", "fp8_block"});
  expect_error(run_sortie({"run", kData + "formats/w4afp8", "--ids", kIds, "--quiet",
                           "--quantization", "w4afp8", "--calibrate", calibrate}),
               2, {"--calibrate", "w4afp8"});
}

TEST(Command, AFileAndAFlagThatDisagreeAreAnError) {
  expect_error(run_sortie({"run", kData + "formats/w4afp8", "--ids", kIds, "--quiet",
                           "--quantization", "w8a8_int8"}),
               2, {"w4afp8", "w8a8_int8"});
}

TEST(Command, SeededSamplingRepeats) {
  const std::vector<std::string> arguments = {"run",     kData + "formats/bf16",
                                              "--ids",   kIds,
                                              "--quiet", "--temperature",
                                              "1",       "--top-p",
                                              "0.9",     "--top-k",
                                              "50",      "--max-new-tokens",
                                              "20",      "--ignore-eos"};
  auto seeded = [&](const std::string& seed) {
    auto a = arguments;
    a.insert(a.end(), {"--random-seed", seed});
    return run_sortie(a).out;
  };
  EXPECT_EQ(seeded("1"), seeded("1"));
  EXPECT_NE(seeded("1"), seeded("2"));
}

// What these processes left in memory that outlives them: SysV segments that they made, and new
// names in /dev/shm. Other programs on the machine have theirs, which come and go.
class SharedMemory {
 public:
  SharedMemory() : before_(names()) {}

  // A process that was killed may still be on its way out: its memory has a moment to go.
  std::set<std::string> left_by(const std::set<pid_t>& processes) const {
    const Deadline deadline(seconds(5));
    std::set<std::string> left = now(processes);
    while (!left.empty() && !deadline.passed()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      left = now(processes);
    }
    return left;
  }

 private:
  static std::set<std::string> names() {
    std::set<std::string> names;
    for (const auto& f : fs::directory_iterator("/dev/shm")) names.insert(f.path().filename());
    return names;
  }
  std::set<std::string> now(const std::set<pid_t>& processes) const {
    std::set<std::string> found;
    for (const std::string& n : names()) {
      if (before_.count(n) == 0) found.insert(n);
    }
    std::ifstream segments("/proc/sysvipc/shm");
    for (std::string line; std::getline(segments, line);) {
      std::istringstream columns(line);
      std::string key, id, perms, size, creator;
      columns >> key >> id >> perms >> size >> creator;
      for (const pid_t p : processes) {
        if (creator == std::to_string(p)) found.insert("segment " + id);
      }
    }
    return found;
  }
  const std::set<std::string> before_;
};

std::set<pid_t> family(const SortieProcess& process) {
  std::set<pid_t> all = {process.pid()};
  for (const pid_t child : process.children()) all.insert(child);
  return all;
}

#if SORTIE_HAS_UCX
TEST(Command, AKilledRankIsNamedAndNothingIsLeft) {
  const SharedMemory memory;
  SortieProcess process({"run", kMini, "-p", "Question: What is 3+4?\nAnswer:", "--quiet",
                         "--ep-size", "2", "--moe-a2a-backend", "ucx", "--ignore-eos",
                         "--max-new-tokens", "1900"});
  ASSERT_TRUE(process.wait_for_output(20, seconds(60)));
  const std::vector<pid_t> ranks = process.children();
  ASSERT_EQ(ranks.size(), 1u);
  const std::set<pid_t> all = family(process);
  kill(ranks[0], SIGKILL);
  const Finished f = process.finish(seconds(15));
  EXPECT_EQ(f.code, 1) << f.err;
  EXPECT_NE(f.err.find("rank 1"), std::string::npos) << f.err;
  EXPECT_EQ(std::count(f.err.begin(), f.err.end(), '\n'), 1) << f.err;
  EXPECT_TRUE(memory.left_by(all).empty());
}

TEST(Command, WithDegradeTheAnswerIsCompletedAndMarked) {
  const SharedMemory memory;
  SortieProcess process({"run", kMini, "-p", "Question: What is 3+4?\nAnswer:", "--quiet",
                         "--ep-size", "2", "--moe-a2a-backend", "ucx", "--ignore-eos",
                         "--max-new-tokens", "600", "--on-rank-loss", "degrade"});
  ASSERT_TRUE(process.wait_for_output(20, seconds(60)));
  const std::vector<pid_t> ranks = process.children();
  ASSERT_EQ(ranks.size(), 1u);
  const std::set<pid_t> all = family(process);
  kill(ranks[0], SIGKILL);
  const Finished f = process.finish(seconds(60));
  EXPECT_EQ(f.code, 0) << f.err;
  EXPECT_NE(f.err.find("note: rank 1 was lost "), std::string::npos) << f.err;
  EXPECT_NE(f.err.find("note: the answer is degraded"), std::string::npos) << f.err;
  EXPECT_TRUE(memory.left_by(all).empty());
}

TEST(Command, WithDegradeAStoppedRankIsFencedWhenItGoesOn) {
  const SharedMemory memory;
  SortieProcess process({"run", kMini, "-p", "Question:", "--quiet", "--ep-size", "4",
                         "--moe-a2a-backend", "ucx", "--ignore-eos", "--max-new-tokens", "1900",
                         "--on-rank-loss", "degrade", "--exchange-timeout", "0.5"});
  ASSERT_TRUE(process.wait_for_output(10, seconds(60)));
  const std::vector<pid_t> ranks = process.children();
  ASSERT_EQ(ranks.size(), 3u);
  const std::set<pid_t> all = family(process);
  kill(ranks[1], SIGSTOP);
  std::this_thread::sleep_for(std::chrono::milliseconds(1200));
  kill(ranks[1], SIGCONT);
  const Finished f = process.finish(seconds(90));
  EXPECT_EQ(f.code, 0) << f.err;
  EXPECT_NE(f.err.find("is out of the group and ends: rank 0 went on without it"),
            std::string::npos)
      << f.err;
  EXPECT_NE(f.err.find("note: the answer is degraded"), std::string::npos) << f.err;
  EXPECT_TRUE(memory.left_by(all).empty());
}

TEST(Command, EvalCountsDegradedAnswers) {
  TemporaryFolder folder;
  SortieProcess process({"eval", "gsm8k", kMini, "--data", kMini + "/eval.jsonl", "--num-questions",
                         "24", "--num-shots", "1", "--quiet", "--json", "--output",
                         folder / "answers", "--ep-size", "2", "--moe-a2a-backend", "ucx",
                         "--on-rank-loss", "degrade"});
  Deadline deadline(seconds(20));
  while (process.children().empty() && !deadline.passed()) usleep(1000);
  usleep(1'500'000);
  const std::vector<pid_t> ranks = process.children();
  if (!ranks.empty()) kill(ranks[0], SIGKILL);
  const Finished f = process.finish(seconds(120));
  ASSERT_EQ(f.code, 0) << f.err;
  std::ifstream file(folder / "answers");
  int64_t marked = 0;
  int64_t answers = 0;
  for (std::string line; std::getline(file, line); ++answers) {
    marked += nlohmann::json::parse(line).at("degraded").get<bool>() ? 1 : 0;
  }
  EXPECT_EQ(answers, 24);
  EXPECT_EQ(nlohmann::json::parse(f.out).at("degraded").get<int64_t>(), marked);
}

TEST(Command, AKilledFrontTakesItsRanksAlong) {
  const SharedMemory memory;
  std::vector<pid_t> ranks;
  std::set<pid_t> all;
  {
    SortieProcess process({"run", kMini, "-p", "Question:", "--quiet", "--ep-size", "4",
                           "--moe-a2a-backend", "ucx", "--ignore-eos", "--max-new-tokens", "1900"});
    ASSERT_TRUE(process.wait_for_output(10, seconds(60)));
    ranks = process.children();
    EXPECT_EQ(ranks.size(), 3u);
    all = family(process);
  }
  const Deadline deadline(seconds(10));
  for (const pid_t rank : ranks) {
    while (kill(rank, 0) == 0 && fs::exists("/proc/" + std::to_string(rank) + "/exe") &&
           !deadline.passed()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
  EXPECT_FALSE(deadline.passed()) << "a rank outlived its front";
  EXPECT_TRUE(memory.left_by(all).empty());
}
#endif

TEST(Command, InterruptEndsTheRun) {
  for (const std::string exchange : {"local", SORTIE_HAS_UCX ? "ucx" : "local"}) {
    const SharedMemory memory;
    SortieProcess process({"run", kMini, "-p", "Question:", "--quiet", "--ep-size", "2",
                           "--moe-a2a-backend", exchange, "--ignore-eos", "--max-new-tokens",
                           "1900"});
    ASSERT_TRUE(process.wait_for_output(10, seconds(60)));
    const std::set<pid_t> all = family(process);
    kill(process.pid(), SIGINT);
    const Finished f = process.finish(seconds(10));
    EXPECT_EQ(f.code, 1) << exchange << ": " << f.err;
    EXPECT_NE(f.err.find("signal"), std::string::npos) << f.err;
    EXPECT_TRUE(memory.left_by(all).empty());
  }
}

TEST(Command, TextCommandsNeedOnlyTheirFiles) {
  TemporaryFolder folder;
  fs::copy(kMini + "/tokenizer.json", folder / "tokenizer.json");
  fs::copy(kMini + "/tokenizer_config.json", folder / "tokenizer_config.json");
  expect_error(run_sortie({"run", folder.path(), "-p", "x"}), 1, {"config.json"});
  EXPECT_EQ(run_sortie({"tokenize", folder.path()}).code, 0);
}

TEST(Command, DoctorNamesTheMachineAndThePlan) {
  const Finished machine = run_sortie({"doctor"});
  EXPECT_EQ(machine.code, 0) << machine.err;
  EXPECT_NE(machine.out.find("read bandwidth"), std::string::npos);
  const Finished model = run_sortie({"doctor", kMini, "--ep-size", "2"});
  EXPECT_EQ(model.code, 0) << model.err;
  EXPECT_NE(model.out.find("8 experts each"), std::string::npos) << model.out;
}

// Every golden, on each instruction set of this processor and on the reference.
struct GoldenCase {
  std::string folder;
  std::string file;
};
class Goldens : public testing::TestWithParam<std::string> {};

TEST_P(Goldens, AllPass) {
  const std::vector<GoldenCase> cases = {
      {kData + "tiny/v3-yarn", "golden.safetensors"},
      {kData + "tiny/v2-lite", "golden.safetensors"},
      {kData + "tiny/v2-group", "golden.safetensors"},
      {kData + "formats/bf16", "golden.safetensors"},
      {kData + "formats/fp8_block", "golden.safetensors"},
      {kData + "formats/w4afp8", "golden.safetensors"},
      {kData + "formats/w8a8_compressed_tensors", "golden.safetensors"},
      {kMini, "golden.json"}};
  const bool reference = GetParam() == "reference";
  for (const GoldenCase& c : cases) {
    // The reference walks mini's prompts in a minute: a run of its own does that.
    if (reference && c.folder == kMini) continue;
    if (kShort && !c.folder.ends_with("w4afp8") && !c.folder.ends_with("v3-yarn")) continue;
    const Finished f = run_sortie({"eval", "goldens", c.folder, c.folder + "/" + c.file, "--quiet",
                                   "--device", reference ? "reference" : "cpu"},
                                  reference ? std::vector<std::string>{}
                                            : std::vector<std::string>{"SORTIE_ISA=" + GetParam()},
                                  300);
    if (f.code == 2 && f.err.find("SORTIE_ISA") != std::string::npos) GTEST_SKIP() << f.err;
    EXPECT_EQ(f.code, 0) << c.folder << "\n" << f.out << f.err;
    EXPECT_NE(f.out.find("pass\n"), std::string::npos) << f.out;
  }
}

// With latents in bf16: the same answers where the golden's choice is clear.
TEST_P(Goldens, Bf16CacheGivesTheAnswers) {
  if (GetParam() == "reference") GTEST_SKIP() << "a minute a prompt: cpu_test has it judge the op";
  if (kShort) GTEST_SKIP() << "mini is left to the release build";
  const Finished f = run_sortie(
      {"eval", "goldens", kMini, kMini + "/golden.json", "--quiet", "--kv-cache-dtype", "bf16"},
      {"SORTIE_ISA=" + GetParam()}, 300);
  if (f.code == 2 && f.err.find("SORTIE_ISA") != std::string::npos) GTEST_SKIP() << f.err;
  EXPECT_EQ(f.code, 0) << f.out << f.err;
  EXPECT_NE(f.out.find("pass\n"), std::string::npos) << f.out;
}

INSTANTIATE_TEST_SUITE_P(Backends, Goldens, testing::ValuesIn(all_devices()),
                         [](const auto& info) { return info.param; });

// The judge itself: another model's goldens must fail.
TEST(Command, GoldensOfAnotherModelFail) {
  const Finished f = run_sortie({"eval", "goldens", kData + "tiny/v2-lite",
                                 kData + "tiny/v2-group/golden.safetensors", "--quiet"});
  EXPECT_EQ(f.code, 1);
  EXPECT_NE(f.out.find("FAIL"), std::string::npos) << f.out;
}

}  // namespace
}  // namespace sortie::cli
