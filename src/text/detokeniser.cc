#include "text/detokeniser.h"

#include "text/utf8.h"

namespace sortie::text {

std::string Detokeniser::push(int32_t id) {
  if (skip_special_ && tokenizer_->is_special(id)) return {};
  held_ += tokenizer_->token_bytes(id);
  std::string text;
  std::string_view rest = held_;
  while (!rest.empty()) {
    const Utf8Step step = utf8_step(rest);
    if (step.kind == Utf8Kind::kIncomplete) break;
    text += step.kind == Utf8Kind::kValid ? rest.substr(0, step.length) : kReplacement;
    rest.remove_prefix(step.length);
  }
  held_ = std::string(rest);
  return text;
}

std::string Detokeniser::finish() {
  std::string text(held_.empty() ? std::string_view() : kReplacement);
  held_.clear();
  return text;
}

}  // namespace sortie::text
