#pragma once

#include <ctime>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"

namespace sortie::text {

struct RenderOptions {
  int64_t max_steps = 40'000'000;
  size_t max_output = size_t{16} << 20;  // bytes, of the result and of any text on the way
  std::optional<std::time_t> now;        // of strftime_now(); default: the clock
};

// A chat template: the part of jinja2 that Hugging Face's apply_chat_template gives to templates,
// with its settings (trim_blocks, lstrip_blocks, a sandbox that changes no value). Immutable.
class ChatTemplate {
 public:
  static Result<ChatTemplate> parse(std::string_view source);

  // `context` is an object: the template's variables. Errors name the template's line.
  Result<std::string> render(const nlohmann::ordered_json& context,
                             const RenderOptions& options = {}) const;

 private:
  struct Program;
  std::shared_ptr<const Program> program_;
};

// The templates and special tokens of a model folder.
class ModelTemplates {
 public:
  // Reads chat_template.jinja or the chat_template of tokenizer_config.json, and bos_token and its
  // kin. `template_file` replaces the model's own template; then a folder without
  // tokenizer_config.json will do.
  static Result<ModelTemplates> load(const std::string& folder,
                                     const std::string& template_file = {});

  // Adds to `request` (messages and whatever else the template knows) what Hugging Face's call
  // would: the special tokens, add_generation_prompt = false, tools and documents = none. A model
  // with a template for tools uses it where the request has any.
  Result<std::string> render(const nlohmann::ordered_json& request,
                             const RenderOptions& options = {}) const;

 private:
  ChatTemplate default_;
  std::optional<ChatTemplate> tool_use_;
  nlohmann::ordered_json tokens_ = nlohmann::ordered_json::object();
};

}  // namespace sortie::text
