#pragma once

#include <string_view>
#include <unordered_map>

#include "text/jinja/interpreter.h"

namespace sortie::text::jinja {

using Filter = Value (*)(Interpreter&, const Value&, const Arguments&);
using Filters = std::unordered_map<std::string_view, Filter>;

// On texts, numbers and single values; on lists and dicts.
const Filters& value_filters();
const Filters& list_filters();

bool has_filter(std::string_view name);

}  // namespace sortie::text::jinja
