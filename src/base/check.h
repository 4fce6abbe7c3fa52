#pragma once

#include <string_view>

namespace sortie {
// Prints file, line, the condition and what was said, then aborts. For broken invariants only:
// whatever a user can cause is a Status.
[[noreturn]] void check_failed(const char* file, int line, const char* condition,
                               std::string_view detail = {});
}  // namespace sortie

#define CHECK(condition, ...)                                                            \
  do {                                                                                   \
    if (!(condition)) [[unlikely]]                                                       \
      ::sortie::check_failed(__FILE__, __LINE__, #condition __VA_OPT__(, ) __VA_ARGS__); \
  } while (0)
