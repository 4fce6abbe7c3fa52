#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/status.h"

namespace sortie {

constexpr int kMaxJsonDepth = 64;

// True if the text's brackets nest deeper than kMaxJsonDepth. Looked at before any parser runs, so
// that no parser's recursion or tree depends on what a file says.
bool json_too_deep(std::string_view text);

// JSON without exceptions, at most kMaxJsonDepth deep; `what` names the text in the error.
Result<nlohmann::json> parse_json(std::string_view text, const std::string& what);
// The same with the keys in the file's order. Objects are limited to 4096 keys: ordered_json
// compares every new key with all before it.
Result<nlohmann::ordered_json> parse_ordered_json(std::string_view text, const std::string& what);

// One line of JSON; text that is not UTF-8 is replaced.
std::string dump_json(const nlohmann::ordered_json& value);

// A whole regular file of at most `max_bytes`.
Result<std::string> read_text_file(const std::string& path, int64_t max_bytes);
bool file_exists(const std::string& path);

}  // namespace sortie
