#include "text/chat_template.h"

#include <fmt/format.h>

#include "base/json.h"
#include "text/jinja/interpreter.h"
#include "text/jinja/parser.h"

namespace sortie::text {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kMaxTemplate = int64_t{1} << 20;
constexpr int64_t kMaxConfig = int64_t{64} << 20;

Status template_error(const jinja::TemplateError& error, int line) {
  return Status::invalid(fmt::format("Chat template, line {}: {}.",
                                     error.line > 0 ? error.line : line, error.message));
}

}  // namespace

struct ChatTemplate::Program {
  jinja::Body body;
};

Result<ChatTemplate> ChatTemplate::parse(std::string_view source) {
  if (source.size() > static_cast<size_t>(kMaxTemplate)) {
    return Status::invalid(fmt::format("The chat template has {} bytes; at most {} are read.",
                                       source.size(), kMaxTemplate));
  }
  try {
    ChatTemplate result;
    result.program_ = std::make_shared<Program>(Program{jinja::parse(source)});
    return result;
  } catch (const jinja::TemplateError& error) {
    return template_error(error, 1);
  }
}

Result<std::string> ChatTemplate::render(const Json& context, const RenderOptions& options) const {
  if (!context.is_object()) {
    return Status::invalid("A chat template needs an object of variables, such as messages.");
  }
  jinja::Budget budget;
  budget.steps = options.max_steps;
  budget.max_bytes = options.max_output;
  jinja::Interpreter interpreter(budget, options.now ? *options.now : std::time(nullptr));
  try {
    const jinja::Value variables = jinja::Value::from_json(context);
    return interpreter.render(program_->body, *variables.as_dict());
  } catch (const jinja::TemplateError& error) {
    return template_error(error, interpreter.line());
  }
}

namespace {

// "…" or {"content": "…"}.
std::optional<std::string> token_text(const Json& token) {
  if (token.is_string()) return token.get<std::string>();
  if (token.is_object()) {
    const auto content = token.find("content");
    if (content != token.end() && content->is_string()) return content->get<std::string>();
  }
  return std::nullopt;
}

Json special_tokens(const Json& config) {
  Json tokens = Json::object();
  for (const char* name : {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token",
                           "cls_token", "mask_token"}) {
    const auto it = config.find(name);
    if (it == config.end()) continue;
    if (auto text = token_text(*it)) tokens[name] = std::move(*text);
  }
  return tokens;
}

struct Sources {
  std::string main;
  std::string tool_use;
};

// The chat_template of tokenizer_config.json: a text, or a list of named ones.
Sources config_sources(const Json& config) {
  Sources sources;
  const auto it = config.find("chat_template");
  if (it == config.end()) return sources;
  if (it->is_string()) sources.main = it->get<std::string>();
  if (!it->is_array()) return sources;
  for (const Json& entry : *it) {
    if (!entry.is_object() || !entry.contains("name") || !entry.contains("template")) continue;
    const auto& text = entry["template"];
    if (!text.is_string()) continue;
    if (entry["name"] == "default") sources.main = text.get<std::string>();
    if (entry["name"] == "tool_use") sources.tool_use = text.get<std::string>();
  }
  return sources;
}

}  // namespace

Result<ModelTemplates> ModelTemplates::load(const std::string& folder,
                                            const std::string& template_file) {
  ModelTemplates result;
  Sources sources;
  const std::string config_path = folder + "/tokenizer_config.json";
  if (file_exists(config_path)) {
    ASSIGN_OR_RETURN(const std::string text, read_text_file(config_path, kMaxConfig));
    ASSIGN_OR_RETURN(const Json config, parse_ordered_json(text, config_path));
    if (!config.is_object()) {
      return Status::invalid(fmt::format("{} is not a JSON object.", config_path));
    }
    result.tokens_ = special_tokens(config);
    sources = config_sources(config);
  }
  const std::string own_file = folder + "/chat_template.jinja";
  const std::string file = !template_file.empty()  ? template_file
                           : file_exists(own_file) ? own_file
                                                   : std::string();
  if (!file.empty()) {
    sources = {};
    ASSIGN_OR_RETURN(sources.main, read_text_file(file, kMaxTemplate));
  }
  if (sources.main.empty()) {
    return Status::invalid(
        fmt::format("{} has no chat template: neither chat_template.jinja nor chat_template in "
                    "tokenizer_config.json; name one with --template.",
                    folder));
  }
  ASSIGN_OR_RETURN(result.default_, ChatTemplate::parse(sources.main));
  if (!sources.tool_use.empty()) {
    ASSIGN_OR_RETURN(result.tool_use_, ChatTemplate::parse(sources.tool_use));
  }
  return result;
}

Result<std::string> ModelTemplates::render(const Json& request,
                                           const RenderOptions& options) const {
  if (!request.is_object()) {
    return Status::invalid("A chat request is an object with messages.");
  }
  Json context = tokens_;
  context["add_generation_prompt"] = false;
  context["tools"] = nullptr;
  context["documents"] = nullptr;
  for (const auto& [key, value] : request.items()) context[key] = value;
  const bool tools = !context["tools"].is_null() && tool_use_;
  return (tools ? *tool_use_ : default_).render(context, options);
}

}  // namespace sortie::text
