#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/status.h"

namespace sortie::model {

constexpr int kMaxJsonDepth = 64;

// True if the text's brackets nest deeper than kMaxJsonDepth. Looked at before any parser runs, so
// that no parser's recursion or tree depends on what a file says.
bool json_too_deep(std::string_view text);

// Parses JSON without exceptions; `what` names the text in the error.
Result<nlohmann::json> parse_json(std::string_view text, const std::string& what);

// A whole file of at most `max_bytes`.
Result<std::string> read_text_file(const std::string& path, int64_t max_bytes);

}  // namespace sortie::model
