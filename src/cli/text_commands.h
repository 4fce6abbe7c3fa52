#pragma once

#include <iosfwd>
#include <string>

#include "base/status.h"

namespace sortie::cli {

struct TextCommandOptions {
  std::string folder;         // with only the files that the command needs
  bool add_special = false;   // tokenize: BOS and whatever else the model's post-processor adds
  bool skip_special = false;  // detokenize: special tokens leave no text
  std::string template_file;  // render: instead of the model's own template
};

// JSON lines in, JSON lines out, one for one; blank lines are passed over. A malformed line ends
// the command with a sentence that names it, after the lines before it were answered.

// {"text": …} gives {"ids": […]}.
Status tokenize_command(const TextCommandOptions& options, std::istream& in, std::ostream& out);
// {"ids": […]} gives {"text": …}.
Status detokenize_command(const TextCommandOptions& options, std::istream& in, std::ostream& out);
// {"messages": […], "add_generation_prompt": true, …} gives {"text": …}, or {"error": …} where the
// template fails; then the next line follows.
Status render_command(const TextCommandOptions& options, std::istream& in, std::ostream& out);

}  // namespace sortie::cli
