#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "base/check.h"
#include "model/quant_description.h"

namespace {

using namespace sortie::model;

struct Value {
  const char* json;
  std::optional<SlimScheme> scheme;
};
constexpr std::array<Value, 8> kValues = {{{R"("FLOAT")", SlimScheme::kFloat},
                                           {R"("W8A8_DYNAMIC")", SlimScheme::kW8A8Dynamic},
                                           {R"("W8A8")", SlimScheme::kW8A8Static},
                                           {R"("W4A8")", std::nullopt},
                                           {R"("")", std::nullopt},
                                           {"null", std::nullopt},
                                           {"8", std::nullopt},
                                           {R"([["FLOAT"]])", std::nullopt}}};

void parse(std::string_view text) {
  const auto d = parse_quant_description(text, "fuzz");
  CHECK(d.is_ok() ? !d->empty() : d.status().message().ends_with('.'));
}

// A description of a weight a line: its first character picks the value, the rest is the module.
// Of equal names the last counts.
void parse_lines(std::string_view lines) {
  std::map<std::string, Value> weights;
  while (!lines.empty()) {
    const std::string_view line = lines.substr(0, lines.find('\n'));
    lines.remove_prefix(std::min(lines.size(), line.size() + 1));
    if (line.empty()) continue;
    // As the reader will see the name: what is not UTF-8 is replaced.
    const std::string quoted = nlohmann::json(line.substr(1))
                                   .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    weights[nlohmann::json::parse(quoted)] = kValues[static_cast<uint8_t>(line[0]) % 8];
  }
  std::string text = R"({"model_quant_type":"W8A8","kv_quant_type":null)";
  bool known = !weights.empty();
  for (const auto& [module, value] : weights) {
    text += "," + nlohmann::json(module + ".weight").dump() + ":" + value.json;
    known = known && value.scheme.has_value();
  }
  const auto d = parse_quant_description(text + "}", "fuzz");
  CHECK(d.is_ok() == known, text);
  if (!d.is_ok()) return;
  CHECK(d->size() == weights.size(), text);
  for (const auto& [module, value] : weights) CHECK(d->at(module) == value.scheme, text);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  parse(input);
  parse_lines(input);
  return 0;
}
