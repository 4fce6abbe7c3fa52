#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "text/jinja/value.h"

// Python's string operations. Letters past ASCII keep their case: chat templates change that of
// roles and types only.
namespace sortie::text::jinja {

std::string upper(std::string_view text);
std::string lower(std::string_view text);
// First letter large, the rest small.
std::string capitalize(std::string_view text);
// str.title: a letter after anything but a letter is large.
std::string title(std::string_view text);

// text.find and rfind; npos where there is none. Linear, where std::string's are not: a text of
// many megabytes may be searched for another.
size_t find_text(std::string_view text, std::string_view part, size_t from, Budget& budget);
size_t find_last(std::string_view text, std::string_view part, Budget& budget);

// `characters` none: white space; otherwise at most 256 bytes of them.
std::string strip(std::string_view text, const Value& characters, bool left, bool right);
// count < 0: all.
std::string replace(std::string_view text, std::string_view from, std::string_view to,
                    int64_t count, Budget& budget);
// separator none: runs of white space, none at the ends. limit < 0: all.
std::vector<Value> split(std::string_view text, const Value& separator, int64_t limit,
                         bool from_right, Budget& budget);
std::vector<Value> split_lines(std::string_view text, bool keep_ends, Budget& budget);
std::string join(const List& items, std::string_view separator, Budget& budget);
std::string indent(std::string_view text, std::string_view by, bool first, bool blank,
                   Budget& budget);

// The text of an argument that must be one.
const std::string& require_string(const Value& value, std::string_view what);

}  // namespace sortie::text::jinja
