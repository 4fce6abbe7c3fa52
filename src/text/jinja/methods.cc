#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "text/jinja/interpreter.h"
#include "text/jinja/python.h"
#include "text/jinja/strings.h"
#include "text/utf8.h"

// What may be called on strings, lists and dicts. Those that would change their value are known so
// that the error says what is wrong: templates run with immutable values, as Hugging Face's
// sandbox has it.
namespace sortie::text::jinja {
namespace {

using Method = Value (*)(Interpreter&, const std::string&, const Arguments&);
using Methods = std::unordered_map<std::string_view, Method>;

// The byte range that the arguments start and end of find, count … ask for is not supported: no
// template uses it.
const std::string& text_argument(const Arguments& a, size_t place, std::string_view name) {
  const Value* value = a.find(place, name);
  if (value == nullptr) fail(fmt::format("a method lacks its argument '{}'", name));
  return require_string(*value, "the argument");
}

bool has_affix(Interpreter& in, const std::string& text, const Value& affixes, bool front) {
  const auto fits = [&](const Value& affix) {
    const std::string& s = require_string(affix, "startswith's or endswith's argument");
    in.budget().charge_bytes(s.size());
    return front ? text.starts_with(s) : text.ends_with(s);
  };
  const List* list = affixes.as_list();
  return list != nullptr && list->tuple ? std::any_of(list->items.begin(), list->items.end(), fits)
                                        : fits(affixes);
}

int64_t find(Interpreter& in, const std::string& text, const std::string& part, bool from_right) {
  const size_t at =
      from_right ? find_last(text, part, in.budget()) : find_text(text, part, 0, in.budget());
  if (at == std::string::npos) return -1;
  return static_cast<int64_t>(utf8_length(std::string_view(text).substr(0, at)));
}

int64_t require_found(int64_t at) {
  if (at < 0) fail("substring not found");
  return at;
}

int64_t count(Interpreter& in, const std::string& text, const std::string& part) {
  if (part.empty()) return static_cast<int64_t>(utf8_length(text)) + 1;
  int64_t n = 0;
  for (size_t at = find_text(text, part, 0, in.budget()); at != std::string::npos;
       at = find_text(text, part, at + part.size(), in.budget())) {
    ++n;
  }
  return n;
}

template <typename Predicate>
bool every(const std::string& text, Predicate predicate) {
  return !text.empty() && std::all_of(text.begin(), text.end(), predicate);
}

bool digit(char c) { return c >= '0' && c <= '9'; }
bool letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || static_cast<uint8_t>(c) >= 0x80;
}
bool large(char c) { return c >= 'A' && c <= 'Z'; }
bool small(char c) { return c >= 'a' && c <= 'z'; }

// left, right or both: the fill goes where the text does not.
std::string pad(Interpreter& in, const std::string& text, const Arguments& a, bool left,
                bool right) {
  const int64_t width = a.whole(0, "width", 0);
  const std::string fill = a.get(1, "fillchar", " ").string() != nullptr
                               ? *a.get(1, "fillchar", " ").string()
                               : std::string(" ");
  const int64_t missing = std::max<int64_t>(0, width - static_cast<int64_t>(utf8_length(text)));
  in.budget().check_bytes(text.size() + static_cast<size_t>(missing));
  in.budget().charge_bytes(text.size() + static_cast<size_t>(missing));
  const int64_t before = left && right ? missing / 2 + (missing & width & 1) : left ? missing : 0;
  std::string out;
  for (int64_t i = 0; i < before; ++i) out += fill;
  out += text;
  for (int64_t i = before; i < missing; ++i) out += fill;
  in.budget().check_bytes(out.size());
  return out;
}

Value partition(Interpreter& in, const std::string& text, const std::string& mark,
                bool from_right) {
  if (mark.empty()) fail("empty separator");
  const size_t at =
      from_right ? find_last(text, mark, in.budget()) : find_text(text, mark, 0, in.budget());
  if (at == std::string::npos) {
    return from_right ? Value::list({"", "", text}, true) : Value::list({text, "", ""}, true);
  }
  return Value::list({text.substr(0, at), mark, text.substr(at + mark.size())}, true);
}

// str.format with {}, {0} and {name}.
Value format(Interpreter& in, const std::string& text, const Arguments& a) {
  std::string out;
  size_t automatic = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if ((c == '{' || c == '}') && i + 1 < text.size() && text[i + 1] == c) {
      out += c;
      ++i;
    } else if (c == '}') {
      fail("single '}' in a format string");
    } else if (c != '{') {
      out += c;
    } else {
      const size_t end = text.find('}', i);
      if (end == std::string::npos) fail("single '{' in a format string");
      const std::string field = text.substr(i + 1, end - i - 1);
      const Value* value = nullptr;
      if (field.empty()) {
        value = a.find(automatic++, "");
      } else if (field.size() < 6 && std::all_of(field.begin(), field.end(), digit)) {
        value = a.find(static_cast<size_t>(std::stoi(field)), "");
      } else {
        value = a.find(SIZE_MAX, field);
      }
      if (value == nullptr) fail(fmt::format("the format field '{{{}}}' has no value", field));
      out += to_text(*value, in.budget());
      i = end;
    }
    in.budget().check_bytes(out.size());
  }
  in.budget().charge_bytes(text.size() + out.size());
  return out;
}

const Methods& string_methods() {
  using I = Interpreter;
  using S = const std::string;
  using A = const Arguments;
  static const Methods kMethods = {
      {"upper", [](I&, S& s, A&) { return Value(upper(s)); }},
      {"lower", [](I&, S& s, A&) { return Value(lower(s)); }},
      {"capitalize", [](I&, S& s, A&) { return Value(capitalize(s)); }},
      {"title", [](I&, S& s, A&) { return Value(title(s)); }},
      {"strip", [](I&, S& s, A& a) { return Value(strip(s, a.get(0, "chars", {}), true, true)); }},
      {"lstrip",
       [](I&, S& s, A& a) { return Value(strip(s, a.get(0, "chars", {}), true, false)); }},
      {"rstrip",
       [](I&, S& s, A& a) { return Value(strip(s, a.get(0, "chars", {}), false, true)); }},
      {"split",
       [](I& in, S& s, A& a) {
         return Value::list(
             split(s, a.get(0, "sep", {}), a.whole(1, "maxsplit", -1), false, in.budget()));
       }},
      {"rsplit",
       [](I& in, S& s, A& a) {
         return Value::list(
             split(s, a.get(0, "sep", {}), a.whole(1, "maxsplit", -1), true, in.budget()));
       }},
      {"splitlines",
       [](I& in, S& s, A& a) {
         return Value::list(split_lines(s, a.truthy(0, "keepends", false), in.budget()));
       }},
      {"startswith",
       [](I& in, S& s, A& a) { return Value(has_affix(in, s, a.get(0, "prefix", {}), true)); }},
      {"endswith",
       [](I& in, S& s, A& a) { return Value(has_affix(in, s, a.get(0, "suffix", {}), false)); }},
      {"replace",
       [](I& in, S& s, A& a) {
         return Value(replace(s, text_argument(a, 0, "old"), text_argument(a, 1, "new"),
                              a.whole(2, "count", -1), in.budget()));
       }},
      {"join",
       [](I& in, S& s, A& a) {
         const auto items = iterate(a.get(0, "iterable", {}), in.budget());
         for (const Value& item : items->items) require_string(item, "join's item");
         return Value(join(*items, s, in.budget()));
       }},
      {"find",
       [](I& in, S& s, A& a) { return Value(find(in, s, text_argument(a, 0, "sub"), false)); }},
      {"rfind",
       [](I& in, S& s, A& a) { return Value(find(in, s, text_argument(a, 0, "sub"), true)); }},
      {"index",
       [](I& in, S& s, A& a) {
         return Value(require_found(find(in, s, text_argument(a, 0, "sub"), false)));
       }},
      {"rindex",
       [](I& in, S& s, A& a) {
         return Value(require_found(find(in, s, text_argument(a, 0, "sub"), true)));
       }},
      {"count", [](I& in, S& s, A& a) { return Value(count(in, s, text_argument(a, 0, "sub"))); }},
      {"isdigit", [](I&, S& s, A&) { return Value(every(s, digit)); }},
      {"isdecimal", [](I&, S& s, A&) { return Value(every(s, digit)); }},
      {"isnumeric", [](I&, S& s, A&) { return Value(every(s, digit)); }},
      {"isalpha", [](I&, S& s, A&) { return Value(every(s, letter)); }},
      {"isalnum",
       [](I&, S& s, A&) { return Value(every(s, [](char c) { return digit(c) || letter(c); })); }},
      {"isspace",
       [](I&, S& s, A&) { return Value(!s.empty() && strip(s, Value(), true, false).empty()); }},
      {"isupper",
       [](I&, S& s, A&) {
         return Value(std::any_of(s.begin(), s.end(), large) &&
                      std::none_of(s.begin(), s.end(), small));
       }},
      {"islower",
       [](I&, S& s, A&) {
         return Value(std::any_of(s.begin(), s.end(), small) &&
                      std::none_of(s.begin(), s.end(), large));
       }},
      {"removeprefix",
       [](I&, S& s, A& a) {
         const std::string& p = text_argument(a, 0, "prefix");
         return Value(s.starts_with(p) ? s.substr(p.size()) : s);
       }},
      {"removesuffix",
       [](I&, S& s, A& a) {
         const std::string& p = text_argument(a, 0, "suffix");
         return Value(s.ends_with(p) ? s.substr(0, s.size() - p.size()) : s);
       }},
      {"partition",
       [](I& in, S& s, A& a) { return partition(in, s, text_argument(a, 0, "sep"), false); }},
      {"rpartition",
       [](I& in, S& s, A& a) { return partition(in, s, text_argument(a, 0, "sep"), true); }},
      {"ljust", [](I& in, S& s, A& a) { return Value(pad(in, s, a, false, true)); }},
      {"rjust", [](I& in, S& s, A& a) { return Value(pad(in, s, a, true, false)); }},
      {"center", [](I& in, S& s, A& a) { return Value(pad(in, s, a, true, true)); }},
      {"format", [](I& in, S& s, A& a) { return format(in, s, a); }},
  };
  return kMethods;
}

bool one_of(std::string_view name, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool changes_list(std::string_view name) {
  return one_of(name, {"append", "extend", "insert", "pop", "remove", "reverse", "sort", "clear"});
}
bool changes_dict(std::string_view name) {
  return one_of(name, {"pop", "popitem", "setdefault", "update", "clear"});
}

Value list_method(Interpreter& in, const List& list, std::string_view name, const Arguments& a) {
  if (name == "copy") return Value::list(list.items, list.tuple);
  const Value item = a.get(0, "value", {});
  int64_t n = 0;
  for (size_t i = 0; i < list.items.size(); ++i) {
    if (!equal(list.items[i], item, in.budget())) continue;
    if (name == "index") return static_cast<int64_t>(i);
    ++n;
  }
  if (name == "index") fail("the value is not in the list");
  return n;
}

Value dict_method(Interpreter& in, const Value& self, std::string_view name, const Arguments& a) {
  const Dict& dict = *self.as_dict();
  if (name == "copy") return self;
  if (name == "get") {
    const Value key = a.get(0, "key", {});
    if (const std::string* s = key.string()) in.budget().charge_bytes(s->size());
    const Value* value = dict.find(key);
    return value != nullptr ? *value : a.get(1, "default", {});
  }
  in.budget().charge(dict.items().size());
  std::vector<Value> result;
  for (const auto& [key, value] : dict.items()) {
    result.push_back(name == "keys"     ? key
                     : name == "values" ? value
                                        : Value::list({key, value}, true));
  }
  return Value::list(std::move(result));
}

}  // namespace

bool has_method(const Value& value, std::string_view name) {
  if (value.is_string()) return string_methods().contains(name);
  if (value.as_list() != nullptr) {
    return one_of(name, {"index", "count", "copy"}) || changes_list(name);
  }
  if (value.as_dict() != nullptr) {
    return one_of(name, {"items", "keys", "values", "get", "copy"}) || changes_dict(name);
  }
  return value.as_loop() != nullptr && name == "cycle";
}

Value call_method(Interpreter& in, const Value& self, std::string_view name, const Arguments& a) {
  if (const std::string* s = self.string()) {
    in.budget().charge_bytes(s->size());
    return string_methods().at(name)(in, *s, a);
  }
  if (const Loop* loop = self.as_loop()) {
    if (a.positional.empty()) fail("loop.cycle() needs values");
    return a.positional[loop->index % a.positional.size()];
  }
  const List* list = self.as_list();
  if (list != nullptr ? changes_list(name) : changes_dict(name)) {
    fail(fmt::format("{}.{}() would change a value, which templates may not do", self.type_name(),
                     name));
  }
  return list != nullptr ? list_method(in, *list, name, a) : dict_method(in, self, name, a);
}

}  // namespace sortie::text::jinja
