#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace sortie::text::jinja {

enum class TokenKind {
  kText,         // between the tags
  kOutputBegin,  // {{
  kOutputEnd,
  kBlockBegin,  // {%
  kBlockEnd,
  kName,
  kString,
  kInteger,
  kFloat,
  kOperator,
  kEnd,
};

struct Token {
  TokenKind kind;
  std::string text;
  int line;
};

// Cuts a template's source into tokens, with trim_blocks and lstrip_blocks set, as Hugging Face's
// apply_chat_template does: the line break after a block or comment goes, and so does the white
// space from the line's beginning to one. Throws TemplateError.
std::vector<Token> lex(std::string_view source);

}  // namespace sortie::text::jinja
