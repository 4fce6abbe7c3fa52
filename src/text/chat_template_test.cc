#include "text/chat_template.h"

#include "text/test_data.h"

namespace sortie::text {
namespace {

using Json = nlohmann::ordered_json;

Result<std::string> render(const std::string& source, const Json& context = Json::object(),
                           const RenderOptions& options = {}) {
  ASSIGN_OR_RETURN(const ChatTemplate parsed, ChatTemplate::parse(source));
  return parsed.render(context, options);
}

std::string error_of(const std::string& source, const Json& context = Json::object()) {
  const auto result = render(source, context);
  EXPECT_FALSE(result.is_ok()) << source << " gave " << result.value();
  return result.is_ok() ? "" : result.status().message();
}

TEST(ChatTemplate, PublishedTemplatesGoldens) {
  const std::string folder = kData + "chat_templates/";
  const auto rows = read_rows(folder + "goldens.jsonl");
  EXPECT_EQ(rows.size(), 103u);
  for (const auto& row : rows) {
    const auto name = row["template"].get<std::string>();
    const auto templates = ModelTemplates::load(kData + "tokenizer", folder + name);
    ASSERT_TRUE(templates.is_ok()) << templates.status().message();
    Json request = row["kwargs"];
    request["messages"] = row["messages"];
    const auto result = templates->render(request);
    const std::string what = name + " " + row["case"].get<std::string>();
    if (row.contains("error")) {
      EXPECT_FALSE(result.is_ok()) << what;
      continue;
    }
    ASSERT_TRUE(result.is_ok()) << what << ": " << result.status().message();
    EXPECT_EQ(*result, row["rendered"].get<std::string>()) << what;
    if (row.contains("ids")) {
      EXPECT_EQ(deepseek_tokenizer().encode(*result, false).value(),
                row["ids"].get<std::vector<int32_t>>())
          << what;
    }
  }
}

// Small templates with jinja2's answers (make_features.py beside the file).
TEST(ChatTemplate, FeaturesAsJinja2) {
  const auto rows = read_rows(kData + "chat_templates/features.jsonl");
  ASSERT_GT(rows.size(), 100u);
  const Json context = rows[0]["context"];
  for (size_t i = 1; i < rows.size(); ++i) {
    const auto source = rows[i]["template"].get<std::string>();
    const auto result = render(source, context);
    if (rows[i].contains("error")) {
      EXPECT_FALSE(result.is_ok()) << source << " gave " << *result;
    } else {
      ASSERT_TRUE(result.is_ok()) << source << ": " << result.status().message();
      EXPECT_EQ(*result, rows[i]["rendered"].get<std::string>()) << source;
    }
  }
}

TEST(ChatTemplate, ErrorsNameTheLine) {
  EXPECT_EQ(error_of("a\nb\n{{ x.y }}"), "Chat template, line 3: 'x' is undefined.");
  EXPECT_EQ(error_of("\n{% if true %}\n{{ raise_exception('Roles must alternate') }}{% endif %}"),
            "Chat template, line 3: Roles must alternate.");
  EXPECT_EQ(error_of("\n\n{% if %}"), "Chat template, line 3: expected a value before '%}'.");
  EXPECT_EQ(error_of("{% for x in y %}\n{{ x }}"),
            "Chat template, line 2: the template ends where endfor was expected.");
  EXPECT_EQ(error_of("{{ '{}' | from_json }}"),
            "Chat template, line 1: there is no filter named 'from_json'.");
  EXPECT_NE(error_of("{% include 'x' %}").find("'include' is not supported"), std::string::npos);
}

TEST(ChatTemplate, GenerationBlocksShowTheirBody) {
  EXPECT_EQ(render("a{% generation %}{{ 'b' }}{% endgeneration %}c").value(), "abc");
}

TEST(ChatTemplate, StrftimeNowTellsTheGivenTime) {
  RenderOptions options;
  options.now = 1'000'000'000;  // 2001-09-09 UTC, and that year everywhere
  EXPECT_EQ(render("{{ strftime_now('%Y-%m') }}", Json::object(), options).value(), "2001-09");
}

TEST(ChatTemplate, BudgetsEndWhatWouldNotEnd) {
  RenderOptions options;
  options.max_steps = 2'000'000;
  const auto refused = [&](const std::string& source) {
    EXPECT_FALSE(render(source, Json::object(), options).is_ok()) << source;
  };
  refused(
      "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
      "{% endfor %}{% endfor %}{% endfor %}");
  refused("{{ range(1000000000) }}");
  refused("{{ range(-9223372036854775807, 9223372036854775807) }}");
  refused("{{ 'x' * 1000000000000 }}");
  refused("{{ [0] * 1000000000000 }}");
  refused(
      "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor "
      "%}");
  refused(
      "{% set n = namespace(l=[1]) %}{% for i in range(90) %}{% set n.l = [n.l, n.l] %}{% endfor %}"
      "{{ n.l }}");
  refused(
      "{% set n = namespace(l=[]) %}{% for i in range(9999) %}{% set n.l = [n.l] %}{% endfor %}");
  refused("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}");
  refused("{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}");
  refused(
      "{% set s = 'a' * 4000000 ~ 'b' %}{% for i in range(9999) %}{{ s.find('a' * 2000000 ~ 'c') }}"
      "{% endfor %}");
  refused("{{ 9223372036854775807 + 1 }}");
  refused("{{ (-9223372036854775807 - 1) // -1 }}");
  refused("{{ 2 ** 64 }}");
}

TEST(ChatTemplate, DeepSourcesAreRefusedNotFollowed) {
  for (const char* piece : {"(", "[", "{1:", "not ", "-", "x if y else ", "x[", "x(", "a|b("}) {
    std::string source = "{{ ";
    for (int i = 0; i < 20000; ++i) source += piece;
    EXPECT_FALSE(ChatTemplate::parse(source).is_ok()) << piece;
    EXPECT_FALSE(ChatTemplate::parse(source + " }}").is_ok()) << piece;
  }
  std::string blocks;
  for (int i = 0; i < 20000; ++i) blocks += "{% if x %}";
  EXPECT_FALSE(ChatTemplate::parse(blocks).is_ok());
}

TEST(ChatTemplate, LongChainsAreNotDeep) {
  std::string sum = "{{ 1";
  std::string filters = "{{ 'a'";
  std::string branches = "{% if false %}";
  for (int i = 0; i < 20000; ++i) {
    sum += " + 1";
    filters += " | upper";
    branches += "{% elif false %}";
  }
  EXPECT_EQ(render(sum + " }}").value(), "20001");
  EXPECT_EQ(render(filters + " }}").value(), "A");
  EXPECT_EQ(render(branches + "{% else %}x{% endif %}").value(), "x");
}

TEST(ChatTemplate, NamespacesThatHoldEachOtherAreFreed) {
  EXPECT_EQ(
      render("{% set a = namespace() %}{% set b = namespace(a=a) %}{% set a.b = b %}"
             "{% macro m() %}{{ a.b.a.b is defined }}{% endmacro %}{% set a.m = m %}{{ a.m() }}")
          .value(),
      "True");
}

TEST(ModelTemplates, TheModelsOwnTemplate) {
  const auto mini = ModelTemplates::load(SORTIE_SOURCE_DIR "/models/mini");
  ASSERT_TRUE(mini.is_ok()) << mini.status().message();
  const Json request = {{"messages", {{{"role", "user"}, {"content", "Hi"}}}},
                        {"add_generation_prompt", true}};
  EXPECT_EQ(mini->render(request).value(),
            "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜><think>\n");
  EXPECT_FALSE(ModelTemplates::load("/nonexistent-folder").is_ok());
  EXPECT_FALSE(mini->render(Json::array()).is_ok());
}

}  // namespace
}  // namespace sortie::text
