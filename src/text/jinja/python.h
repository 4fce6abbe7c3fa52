#pragma once

#include <string>
#include <string_view>

#include "text/jinja/value.h"

// Python's ways of writing and comparing values, which templates rely on.
namespace sortie::text::jinja {

// str(value); an undefined value is empty.
std::string to_text(const Value& value, Budget& budget);
// repr(value), as lists show their items.
std::string to_repr(const Value& value, Budget& budget);
// float.__repr__: the shortest digits that read back.
std::string float_text(double value);

struct JsonStyle {
  int indent = -1;  // < 0: one line
  std::string item_separator = ", ";
  std::string key_separator = ": ";
  bool ensure_ascii = false;
  bool sort_keys = false;
};
// json.dumps(value).
std::string to_json(const Value& value, const JsonStyle& style, Budget& budget);

bool equal(const Value& a, const Value& b, Budget& budget);
// Negative, zero, positive; fails for types that have no order.
int compare(const Value& a, const Value& b, Budget& budget);
// item in container
bool contains(const Value& container, const Value& item, Budget& budget);
// What `for` runs over: a list's items, a dict's keys, a text's characters, nothing if undefined.
std::shared_ptr<const List> iterate(const Value& value, Budget& budget);
int64_t length(const Value& value, Budget& budget);
// sequence[begin:end:step]; absent bounds are none.
Value slice(const Value& sequence, const Value& begin, const Value& end, const Value& step,
            Budget& budget);
// Python's index rule: negative counts from the end. False if out of range.
bool resolve_index(int64_t index, size_t size, size_t& out);

// + - * / // % ** of two values.
Value arithmetic(std::string_view op, const Value& a, const Value& b, Budget& budget);
// format % arguments
Value percent_format(const std::string& format, const Value& arguments, Budget& budget);

}  // namespace sortie::text::jinja
