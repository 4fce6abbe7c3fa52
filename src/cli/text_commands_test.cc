#include "cli/text_commands.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

namespace sortie::cli {
namespace {

using Command = Status (*)(const TextCommandOptions&, std::istream&, std::ostream&);

struct Outcome {
  Status status;
  std::string out;
};

Outcome run(Command command, const std::string& input, TextCommandOptions options = {}) {
  if (options.folder.empty()) options.folder = SORTIE_SOURCE_DIR "/models/mini";
  std::istringstream in(input);
  std::ostringstream out;
  Status status = command(options, in, out);
  return {std::move(status), out.str()};
}

TEST(TextCommands, TokenizeAndBack) {
  const std::string lines = "{\"text\": \"Question: 1\"}\n\n{\"text\": \"\"}";
  const Outcome ids = run(tokenize_command, lines);
  ASSERT_TRUE(ids.status.is_ok()) << ids.status.message();
  EXPECT_EQ(ids.out.find("{\"ids\":["), 0u);
  EXPECT_EQ(ids.out.substr(ids.out.find('\n')), "\n{\"ids\":[]}\n");
  const Outcome text = run(detokenize_command, ids.out);
  EXPECT_EQ(text.out, "{\"text\":\"Question: 1\"}\n{\"text\":\"\"}\n");
}

TEST(TextCommands, SpecialTokensOnlyOnRequest) {
  const Outcome with = run(tokenize_command, "{\"text\": \"\"}", {.add_special = true});
  EXPECT_EQ(with.out, "{\"ids\":[0]}\n");
  EXPECT_EQ(run(detokenize_command, "{\"ids\": [0]}").out,
            "{\"text\":\"<｜begin▁of▁sentence｜>\"}\n");
  EXPECT_EQ(run(detokenize_command, "{\"ids\": [0]}", {.skip_special = true}).out,
            "{\"text\":\"\"}\n");
}

TEST(TextCommands, RenderAnswersErrorsAndGoesOn) {
  const Outcome outcome = run(render_command,
                              "{\"messages\": [{\"role\": \"assistant\", \"content\": null}]}\n"
                              "{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}], "
                              "\"add_generation_prompt\": true}\n");
  ASSERT_TRUE(outcome.status.is_ok());
  EXPECT_EQ(outcome.out.find("{\"error\":\"Chat template, line 1: "), 0u);
  EXPECT_EQ(outcome.out.substr(outcome.out.find('\n') + 1),
            "{\"text\":\"<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜><think>\\n\"}\n");
}

TEST(TextCommands, ATemplateFileNeedsNoModel) {
  const auto folder = std::filesystem::path(testing::TempDir()) / "sortie_text_commands";
  std::filesystem::create_directories(folder);
  const std::string file = folder / "t.jinja";
  std::ofstream(file) << "{% for m in messages %}{{ m.content }}{{ x }}{% endfor %}";
  const Outcome outcome = run(render_command, "{\"messages\": [{\"content\": \"a\"}], \"x\": 1}",
                              {.folder = folder.string(), .template_file = file});
  EXPECT_EQ(outcome.out, "{\"text\":\"a1\"}\n");
  std::filesystem::remove_all(folder);
}

TEST(TextCommands, AMalformedLineIsNamedAfterTheLinesBeforeItWereAnswered) {
  const auto fails = [](Command command, const std::string& good, const std::string& bad) {
    const Outcome outcome = run(command, good + "\n" + bad + "\n" + good + "\n");
    EXPECT_EQ(outcome.status.exit_code(), 1) << bad;
    EXPECT_EQ(outcome.status.message().find("Line 2 of the input "), 0u)
        << outcome.status.message();
    EXPECT_EQ(outcome.out, run(command, good).out);
  };
  const std::string deep(200, '[');
  for (const std::string bad : {"{", "[]", "{}", "{\"text\": 1}", deep.c_str(), "nonsense"}) {
    fails(tokenize_command, "{\"text\": \"a\"}", bad);
  }
  for (const std::string bad :
       {"{\"ids\": 1}", "{\"ids\": [-1]}", "{\"ids\": [1.5]}", "{\"ids\": [4294967296]}"}) {
    fails(detokenize_command, "{\"ids\": [5]}", bad);
  }
  fails(render_command, "{\"messages\": []}", "{\"messages\": \"x\"}");
}

TEST(TextCommands, BrokenUtf8IsReplaced) {
  const Outcome ids = run(tokenize_command, "{\"text\": \"a\xFF\"}");
  ASSERT_TRUE(ids.status.is_ok()) << ids.status.message();
  EXPECT_EQ(run(detokenize_command, ids.out).out, "{\"text\":\"a\xEF\xBF\xBD\"}\n");
  const Outcome half = run(detokenize_command, "{\"ids\": [" + std::to_string(3 + 94 + 60) + "]}");
  EXPECT_TRUE(nlohmann::json::accept(half.out)) << half.out;  // parses, so it is UTF-8
}

}  // namespace
}  // namespace sortie::cli
