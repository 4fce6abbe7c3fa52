// Fuzzes the template interpreter: any source is refused or rendered within its budget.
#include <cstdint>
#include <string_view>

#include "text/chat_template.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const nlohmann::ordered_json kContext = {
      {"messages",
       {{{"role", "user"}, {"content", "Hi"}},
        {{"role", "assistant"}, {"content", nullptr}, {"tool_calls", {{{"id", 1}}}}}}},
      {"s", "a text"},
      {"n", 7},
      {"f", 2.5},
      {"bos_token", "<s>"}};
  const auto parsed = sortie::text::ChatTemplate::parse(
      std::string_view(reinterpret_cast<const char*>(data), size));
  if (!parsed.is_ok()) return 0;
  // A small budget, so that the fuzzer tries many sources.
  const auto result =
      parsed->render(kContext, {.max_steps = 20'000, .max_output = size_t{1} << 20, .now = 0});
  static_cast<void>(result.is_ok());
  return 0;
}
