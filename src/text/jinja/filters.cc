#include "text/jinja/filters.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>

#include "text/jinja/python.h"
#include "text/jinja/strings.h"

namespace sortie::text::jinja {
namespace {

std::string text_of(Interpreter& in, const Value& v) { return to_text(v, in.budget()); }

void refuse_undefined(const Value& v) {
  if (const auto* u = v.get_if<Value::Undefined>()) fail(*u->what);
}

// jinja2's title: words begin after white space, hyphens and opening brackets.
std::string title_words(std::string_view text) {
  std::string out;
  bool begin = true;
  for (const char c : text) {
    const std::string_view one(&c, 1);
    out += begin ? upper(one) : lower(one);
    begin = std::string_view("- \t\n\r\v\f({[<").find(c) != std::string_view::npos;
  }
  return out;
}

std::string escape_html(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&#34;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

Value to_int(Interpreter& in, const Value& v, const Arguments& a) {
  refuse_undefined(v);
  Value otherwise = a.get(0, "default", int64_t{0});
  int64_t whole = 0;
  if (v.whole(whole)) return whole;
  double d = 0;
  if (const double* real = v.get_if<double>()) {
    d = *real;
  } else if (const std::string* s = v.string()) {
    const std::string text = strip(*s, Value(), true, true);
    const int64_t base = a.whole(1, "base", 10);
    if (base < 2 || base > 36) return otherwise;
    const char* begin = text.data() + (text.starts_with('+') ? 1 : 0);
    const char* end = text.data() + text.size();
    const auto parsed = std::from_chars(begin, end, whole, static_cast<int>(base));
    if (parsed.ec == std::errc() && parsed.ptr == end && begin != end) return whole;
    const auto real = std::from_chars(begin, end, d);
    if (real.ec != std::errc() || real.ptr != end || begin == end) return otherwise;
  } else {
    return otherwise;
  }
  in.budget().charge(1);
  if (!(std::abs(d) < 9.2e18)) return otherwise;
  return static_cast<int64_t>(d);
}

Value to_float(Interpreter&, const Value& v, const Arguments& a) {
  refuse_undefined(v);
  if (v.is_number()) return v.number();
  if (const std::string* s = v.string()) {
    const std::string text = strip(*s, Value(), true, true);
    const char* begin = text.data() + (text.starts_with('+') ? 1 : 0);
    const char* end = text.data() + text.size();
    double d = 0;
    const auto parsed = std::from_chars(begin, end, d);
    if (parsed.ec == std::errc() && parsed.ptr == end && begin != end) return d;
  }
  return a.get(0, "default", 0.0);
}

Value round_number(Interpreter&, const Value& v, const Arguments& a) {
  refuse_undefined(v);
  if (!v.is_number()) fail(fmt::format("round needs a number, not {}", v.type_name()));
  const int64_t precision = a.whole(0, "precision", 0);
  const Value method = a.get(1, "method", "common");
  const std::string& how = require_string(method, "round's method");
  if (precision < -300 || precision > 300) fail("round's precision is out of range");
  const double scale = std::pow(10.0, static_cast<double>(precision));
  if (how == "ceil") return std::ceil(v.number() * scale) / scale;
  if (how == "floor") return std::floor(v.number() * scale) / scale;
  if (how != "common") fail("round's method is common, ceil or floor");
  if (!v.is_float() && precision >= 0) return v;
  if (precision < 0) return std::nearbyint(v.number() * scale) / scale;
  if (!std::isfinite(v.number())) return v;
  // The decimal digits as printed, half to even on the exact value: what Python's round does.
  return std::stod(fmt::format("{:.{}f}", v.number(), precision));
}

Value json_text(Interpreter& in, const Value& v, const Arguments& a) {
  JsonStyle style;
  style.ensure_ascii = a.truthy(0, "ensure_ascii", false);
  const Value indent = a.get(1, "indent", {});
  if (!indent.is_none()) {
    style.indent = static_cast<int>(std::clamp<int64_t>(a.whole(1, "indent", 0), 0, 100));
    style.item_separator = ",";
  }
  if (const Value separators = a.get(2, "separators", {}); !separators.is_none()) {
    const List* list = separators.as_list();
    if (list == nullptr || list->items.size() != 2) fail("separators must be a pair");
    style.item_separator = require_string(list->items[0], "a separator");
    style.key_separator = require_string(list->items[1], "a separator");
  }
  style.sort_keys = a.truthy(3, "sort_keys", false);
  return to_json(v, style, in.budget());
}

Value default_value(Interpreter&, const Value& v, const Arguments& a) {
  const bool falsy_too = a.truthy(1, "boolean", false);
  const bool use = v.is_undefined() || (falsy_too && !v.truthy());
  return use ? a.get(0, "default_value", "") : v;
}

Value indent_text(Interpreter& in, const Value& v, const Arguments& a) {
  std::string by;
  const Value width = a.get(0, "width", int64_t{4});
  if (const std::string* s = width.string()) {
    by = *s;
  } else {
    by.assign(static_cast<size_t>(std::clamp<int64_t>(a.whole(0, "width", 4), 0, 10'000)), ' ');
  }
  return indent(text_of(in, v), by, a.truthy(1, "first", false), a.truthy(2, "blank", false),
                in.budget());
}

}  // namespace

const Filters& value_filters() {
  using I = Interpreter;
  using V = const Value;
  using A = const Arguments;
  static const Filters kFilters = {
      {"upper", [](I& in, V& v, A&) { return Value(upper(text_of(in, v))); }},
      {"lower", [](I& in, V& v, A&) { return Value(lower(text_of(in, v))); }},
      {"capitalize", [](I& in, V& v, A&) { return Value(capitalize(text_of(in, v))); }},
      {"title", [](I& in, V& v, A&) { return Value(title_words(text_of(in, v))); }},
      {"trim",
       [](I& in, V& v, A& a) {
         return Value(strip(text_of(in, v), a.get(0, "chars", {}), true, true));
       }},
      {"replace",
       [](I& in, V& v, A& a) {
         return Value(replace(text_of(in, v), text_of(in, a.get(0, "old", "")),
                              text_of(in, a.get(1, "new", "")), a.whole(2, "count", -1),
                              in.budget()));
       }},
      {"format",
       [](I& in, V& v, A& a) {
         return percent_format(text_of(in, v), Value::list(a.positional, true), in.budget());
       }},
      {"indent", indent_text},
      {"escape", [](I& in, V& v, A&) { return Value(escape_html(text_of(in, v))); }},
      {"e", [](I& in, V& v, A&) { return Value(escape_html(text_of(in, v))); }},
      {"string", [](I& in, V& v, A&) { return Value(text_of(in, v)); }},
      {"safe", [](I&, V& v, A&) { return v; }},
      {"wordcount",
       [](I& in, V& v, A&) {
         return Value(
             static_cast<int64_t>(split(text_of(in, v), Value(), -1, false, in.budget()).size()));
       }},
      {"tojson", json_text},
      {"int", to_int},
      {"float", to_float},
      {"round", round_number},
      {"abs",
       [](I& in, V& v, A&) {
         refuse_undefined(v);
         if (!v.is_number()) fail(fmt::format("abs needs a number, not {}", v.type_name()));
         return v.number() < 0 ? arithmetic("-", int64_t{0}, v, in.budget()) : v;
       }},
      {"default", default_value},
      {"d", default_value},
      {"attr",
       [](I& in, V& v, A& a) {  // attributes alone, where x.name also takes a dict's keys
         const Value name = a.get(0, "name", {});
         const std::string& text = require_string(name, "attr's name");
         const bool key = v.as_dict() != nullptr && !has_method(v, text);
         return key ? Value::undefined("a dict has no attributes") : in.attribute(v, text);
       }},
  };
  return kFilters;
}

bool has_filter(std::string_view name) {
  return value_filters().contains(name) || list_filters().contains(name);
}

Value Interpreter::filter(std::string_view name, const Value& input, const Arguments& arguments) {
  budget_.charge_bytes(name.size());
  for (const Filters* table : {&value_filters(), &list_filters()}) {
    const auto it = table->find(name);
    if (it != table->end()) return it->second(*this, input, arguments);
  }
  fail(fmt::format("there is no filter named '{}'", name));
}

}  // namespace sortie::text::jinja
