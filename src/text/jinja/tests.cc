#include <fmt/format.h>

#include <cmath>

#include "text/jinja/filters.h"
#include "text/jinja/interpreter.h"
#include "text/jinja/python.h"
#include "text/jinja/strings.h"

// What may follow `is`.
namespace sortie::text::jinja {
namespace {

using Test = bool (*)(Interpreter&, const Value&, const Arguments&);

int64_t whole_number(const Value& value) {
  int64_t n = 0;
  if (!value.whole(n)) fail(fmt::format("an integer is needed, not {}", value.type_name()));
  return n;
}

Value first(const Arguments& a) {
  if (a.positional.empty()) fail("the test lacks its operand");
  return a.positional[0];
}

bool same(const Value& a, const Value& b, Budget& budget) {
  if (a.type_name() != b.type_name()) return false;
  if (a.as_list() != nullptr) return a.as_list() == b.as_list();
  if (a.as_dict() != nullptr) return a.as_dict() == b.as_dict();
  return equal(a, b, budget);
}

const std::unordered_map<std::string_view, Test>& tests() {
  using I = Interpreter;
  using V = const Value;
  using A = const Arguments;
  static const Test kEqual = [](I& in, V& v, A& a) { return equal(v, first(a), in.budget()); };
  static const Test kUnequal = [](I& in, V& v, A& a) { return !equal(v, first(a), in.budget()); };
  static const Test kLess = [](I& in, V& v, A& a) { return compare(v, first(a), in.budget()) < 0; };
  static const Test kMore = [](I& in, V& v, A& a) { return compare(v, first(a), in.budget()) > 0; };
  static const Test kAtMost = [](I& in, V& v, A& a) {
    return compare(v, first(a), in.budget()) <= 0;
  };
  static const Test kAtLeast = [](I& in, V& v, A& a) {
    return compare(v, first(a), in.budget()) >= 0;
  };
  static const std::unordered_map<std::string_view, Test> kTests = {
      {"defined", [](I&, V& v, A&) { return !v.is_undefined(); }},
      {"undefined", [](I&, V& v, A&) { return v.is_undefined(); }},
      {"none", [](I&, V& v, A&) { return v.is_none(); }},
      {"string", [](I&, V& v, A&) { return v.is_string(); }},
      {"number", [](I&, V& v, A&) { return v.is_number(); }},
      {"integer", [](I&, V& v, A&) { return v.is_int(); }},
      {"float", [](I&, V& v, A&) { return v.is_float(); }},
      {"boolean", [](I&, V& v, A&) { return v.is_bool(); }},
      {"true", [](I&, V& v, A&) { return v.is_bool() && v.truthy(); }},
      {"false", [](I&, V& v, A&) { return v.is_bool() && !v.truthy(); }},
      {"mapping", [](I&, V& v, A&) { return v.as_dict() != nullptr; }},
      {"iterable",
       [](I&, V& v, A&) {
         return v.is_undefined() || v.is_string() || v.as_list() != nullptr ||
                v.as_dict() != nullptr || v.as_loop() != nullptr;
       }},
      {"sequence",
       [](I&, V& v, A&) {
         return v.is_undefined() || v.is_string() || v.as_list() != nullptr ||
                v.as_dict() != nullptr;
       }},
      {"callable", [](I&, V& v, A&) { return v.as_callable() != nullptr; }},
      {"odd", [](I&, V& v, A&) { return whole_number(v) % 2 != 0; }},
      {"even", [](I&, V& v, A&) { return whole_number(v) % 2 == 0; }},
      {"divisibleby",
       [](I& in, V& v, A& a) { return arithmetic("%", v, first(a), in.budget()).number() == 0; }},
      {"lower",
       [](I& in, V& v, A&) {
         const std::string s = to_text(v, in.budget());
         return s == lower(s) && s != upper(s);
       }},
      {"upper",
       [](I& in, V& v, A&) {
         const std::string s = to_text(v, in.budget());
         return s == upper(s) && s != lower(s);
       }},
      {"sameas", [](I& in, V& v, A& a) { return same(v, first(a), in.budget()); }},
      {"in", [](I& in, V& v, A& a) { return contains(first(a), v, in.budget()); }},
      {"filter", [](I& in, V& v, A&) { return has_filter(to_text(v, in.budget())); }},
      {"test", [](I& in, V& v, A&) { return tests().contains(to_text(v, in.budget())); }},
      {"escaped", [](I&, V&, A&) { return false; }},
      {"eq", kEqual},
      {"equalto", kEqual},
      {"==", kEqual},
      {"ne", kUnequal},
      {"!=", kUnequal},
      {"lt", kLess},
      {"lessthan", kLess},
      {"<", kLess},
      {"gt", kMore},
      {"greaterthan", kMore},
      {">", kMore},
      {"le", kAtMost},
      {"<=", kAtMost},
      {"ge", kAtLeast},
      {">=", kAtLeast},
  };
  return kTests;
}

}  // namespace

bool Interpreter::test(std::string_view name, const Value& value, const Arguments& arguments) {
  budget_.charge_bytes(name.size());
  const auto it = tests().find(name);
  if (it == tests().end()) fail(fmt::format("there is no test named '{}'", name));
  return it->second(*this, value, arguments);
}

}  // namespace sortie::text::jinja
