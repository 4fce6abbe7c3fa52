#include "cli/text_commands.h"

#include <fmt/format.h>

#include <cstdint>
#include <istream>
#include <limits>
#include <ostream>
#include <vector>

#include "base/json.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

namespace sortie::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMaxLine = size_t{64} << 20;

enum class Line { kRead, kEnd, kTooLong };

// A line without its end. getline would take whatever comes into memory.
Line read_line(std::istream& in, std::string& line) {
  line.clear();
  std::streambuf* source = in.rdbuf();
  for (;;) {
    const int c = source->sbumpc();
    if (c == std::char_traits<char>::eof()) return line.empty() ? Line::kEnd : Line::kRead;
    if (c == '\n') return Line::kRead;
    if (line.size() >= kMaxLine) return Line::kTooLong;
    line += static_cast<char>(c);
  }
}

// Calls answer(request, reply) for each line, where reply becomes the line that is written.
template <typename Answer>
Status for_each_line(std::istream& in, std::ostream& out, Answer answer) {
  std::string line;
  for (int64_t number = 1;; ++number) {
    const Line read = read_line(in, line);
    if (read == Line::kEnd) return {};
    const std::string what = fmt::format("Line {} of the input", number);
    if (read == Line::kTooLong) {
      return Status::invalid(fmt::format("{} has more than {} bytes.", what, kMaxLine));
    }
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    ASSIGN_OR_RETURN(const Json request, parse_ordered_json(text::valid_utf8(line), what));
    Json reply;
    const Status status = answer(request, reply);
    if (!status.is_ok()) {
      return Status::invalid(fmt::format("{} {}.", what, status.message()));
    }
    out << dump_json(reply) << '\n' << std::flush;
    if (!out) return Status::exhausted("The output cannot be written.");
  }
}

const Json* member(const Json& request, const char* key) {
  if (!request.is_object()) return nullptr;
  const auto it = request.find(key);
  return it == request.end() ? nullptr : &*it;
}

Result<std::vector<int32_t>> read_ids(const Json* list) {
  const Status malformed = Status::invalid("has no \"ids\" that is a list of token ids");
  if (list == nullptr || !list->is_array()) return malformed;
  std::vector<int32_t> ids;
  ids.reserve(list->size());
  for (const Json& id : *list) {
    // Unsigned as the parser stores it: negative ids, and what int64 cannot hold, fail here.
    if (!id.is_number_unsigned() ||
        id.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int32_t>::max())) {
      return malformed;
    }
    ids.push_back(id.get<int32_t>());
  }
  return ids;
}

}  // namespace

Status tokenize_command(const TextCommandOptions& options, std::istream& in, std::ostream& out) {
  ASSIGN_OR_RETURN(const auto tokenizer, text::Tokenizer::load(options.folder));
  return for_each_line(in, out, [&](const Json& request, Json& reply) -> Status {
    const Json* line = member(request, "text");
    if (line == nullptr || !line->is_string()) {
      return Status::invalid("has no \"text\" that is a string");
    }
    ASSIGN_OR_RETURN(const auto ids,
                     tokenizer->encode(line->get_ref<const std::string&>(), options.add_special));
    reply["ids"] = ids;
    return {};
  });
}

Status detokenize_command(const TextCommandOptions& options, std::istream& in, std::ostream& out) {
  ASSIGN_OR_RETURN(const auto tokenizer, text::Tokenizer::load(options.folder));
  return for_each_line(in, out, [&](const Json& request, Json& reply) -> Status {
    ASSIGN_OR_RETURN(const auto ids, read_ids(member(request, "ids")));
    reply["text"] = tokenizer->decode(ids, options.skip_special);
    return {};
  });
}

Status render_command(const TextCommandOptions& options, std::istream& in, std::ostream& out) {
  ASSIGN_OR_RETURN(const auto templates,
                   text::ModelTemplates::load(options.folder, options.template_file));
  return for_each_line(in, out, [&](const Json& request, Json& reply) -> Status {
    const Json* messages = member(request, "messages");
    if (messages == nullptr || !messages->is_array()) {
      return Status::invalid("has no \"messages\" that is a list");
    }
    const auto result = templates.render(request);
    reply[result.is_ok() ? "text" : "error"] =
        result.is_ok() ? result.value() : result.status().message();
    return {};
  });
}

}  // namespace sortie::cli
