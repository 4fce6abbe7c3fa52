#pragma once

#include <string_view>

#include "text/jinja/ast.h"

namespace sortie::text::jinja {

// Throws TemplateError with the line.
Body parse(std::string_view source);

}  // namespace sortie::text::jinja
