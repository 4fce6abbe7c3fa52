#include <fmt/format.h>

#include <algorithm>

#include "text/jinja/filters.h"
#include "text/jinja/python.h"
#include "text/jinja/strings.h"

namespace sortie::text::jinja {
namespace {

using I = Interpreter;

// x.a.b for "a.b"; numbers are subscripts. A null path is the value itself. What is undefined on
// the way becomes `otherwise`, if there is one.
Value follow_path(I& in, Value value, const Value& path, const Value* otherwise = nullptr) {
  int64_t index = 0;
  if (path.is_none()) return value;
  if (path.whole(index)) return in.subscript(value, path);
  const std::string& text = require_string(path, "an attribute");
  for (const Value& part : split(text, ".", -1, false, in.budget())) {
    const std::string& name = *part.string();
    const bool number =
        !name.empty() && name.size() < 10 &&
        std::all_of(name.begin(), name.end(), [](char c) { return c >= '0' && c <= '9'; });
    value = in.subscript(value, number ? Value(static_cast<int64_t>(std::stoll(name))) : part);
    if (otherwise != nullptr && value.is_undefined()) value = *otherwise;
  }
  return value;
}

// The arguments from `from` on, for a filter or test that is named by the first ones.
Arguments rest(const Arguments& a, size_t from) {
  Arguments result;
  for (size_t i = from; i < a.positional.size(); ++i) result.positional.push_back(a.positional[i]);
  result.named = a.named;
  return result;
}

Value map(I& in, const Value& v, const Arguments& a) {
  const auto items = iterate(v, in.budget());
  std::vector<Value> result;
  if (const Value* path = a.find(SIZE_MAX, "attribute"); path != nullptr && a.positional.empty()) {
    const Value* otherwise = a.find(SIZE_MAX, "default");
    for (const Value& item : items->items) {
      result.push_back(follow_path(in, item, *path, otherwise));
    }
    return Value::list(std::move(result));
  }
  if (a.positional.empty()) fail("map needs a filter's name or an attribute");
  const std::string& name = require_string(a.positional[0], "a filter's name");
  const Arguments more = rest(a, 1);
  for (const Value& item : items->items) {
    in.budget().charge(1);
    result.push_back(in.filter(name, item, more));
  }
  return Value::list(std::move(result));
}

// select, reject, selectattr, rejectattr.
Value choose(I& in, const Value& v, const Arguments& a, bool attribute, bool wanted) {
  const size_t place = attribute ? 1 : 0;
  if (a.positional.size() < place) fail("selectattr and rejectattr need an attribute");
  const Value path = attribute ? a.positional[0] : Value();
  const auto items = iterate(v, in.budget());
  const Arguments more = rest(a, place + 1);
  std::vector<Value> result;
  for (const Value& item : items->items) {
    in.budget().charge(1);
    const Value subject = follow_path(in, item, path);
    const bool holds =
        a.positional.size() > place
            ? in.test(require_string(a.positional[place], "a test's name"), subject, more)
            : subject.truthy();
    if (holds == wanted) result.push_back(item);
  }
  return Value::list(std::move(result));
}

// What items are ordered by: an attribute, in small letters unless the case counts.
Value sort_key(I& in, const Value& item, const Value& path, bool case_sensitive) {
  Value key = follow_path(in, item, path);
  if (!case_sensitive && key.string() != nullptr) return lower(*key.string());
  return key;
}

struct Keyed {
  Value key;
  Value item;
};

std::vector<Keyed> keyed(I& in, const Value& v, const Value& path, bool case_sensitive) {
  std::vector<Keyed> result;
  const auto all = iterate(v, in.budget());
  for (const Value& item : all->items) {
    in.budget().charge(1);
    result.push_back({sort_key(in, item, path, case_sensitive), item});
  }
  return result;
}

void sort_by_key(I& in, std::vector<Keyed>& items, bool reverse) {
  std::stable_sort(items.begin(), items.end(), [&](const Keyed& a, const Keyed& b) {
    return reverse ? compare(b.key, a.key, in.budget()) < 0
                   : compare(a.key, b.key, in.budget()) < 0;
  });
}

Value items_of(std::vector<Keyed> keyed_items) {
  std::vector<Value> result;
  result.reserve(keyed_items.size());
  for (Keyed& k : keyed_items) result.push_back(std::move(k.item));
  return Value::list(std::move(result));
}

Value sort(I& in, const Value& v, const Arguments& a) {
  auto items = keyed(in, v, a.get(2, "attribute", {}), a.truthy(1, "case_sensitive", false));
  sort_by_key(in, items, a.truthy(0, "reverse", false));
  return items_of(std::move(items));
}

Value dictsort(I& in, const Value& v, const Arguments& a) {
  const Dict* dict = v.as_dict();
  if (dict == nullptr) fail(fmt::format("dictsort needs a dict, not {}", v.type_name()));
  const Value by = a.get(1, "by", "key");
  const bool by_value = require_string(by, "dictsort's by") == "value";
  const bool case_sensitive = a.truthy(0, "case_sensitive", false);
  std::vector<Keyed> items;
  for (const auto& [key, value] : dict->items()) {
    items.push_back({sort_key(in, by_value ? value : key, Value(), case_sensitive),
                     Value::list({key, value}, true)});
  }
  sort_by_key(in, items, a.truthy(2, "reverse", false));
  return items_of(std::move(items));
}

Value unique(I& in, const Value& v, const Arguments& a) {
  std::vector<Keyed> kept;
  for (Keyed& k : keyed(in, v, a.get(1, "attribute", {}), a.truthy(0, "case_sensitive", false))) {
    const bool seen = std::any_of(kept.begin(), kept.end(), [&](const Keyed& other) {
      return equal(other.key, k.key, in.budget());
    });
    if (!seen) kept.push_back(std::move(k));
  }
  return items_of(std::move(kept));
}

Value extreme(I& in, const Value& v, const Arguments& a, bool largest) {
  auto items = keyed(in, v, a.get(1, "attribute", {}), a.truthy(0, "case_sensitive", false));
  if (items.empty()) return Value::undefined("No aggregated item, sequence was empty.");
  const Keyed* best = &items[0];
  for (const Keyed& k : items) {
    const int order = compare(k.key, best->key, in.budget());
    if (largest ? order > 0 : order < 0) best = &k;
  }
  return best->item;
}

Value sum(I& in, const Value& v, const Arguments& a) {
  Value total = a.get(1, "start", int64_t{0});
  const Value path = a.get(0, "attribute", {});
  const auto all = iterate(v, in.budget());
  for (const Value& item : all->items) {
    total = arithmetic("+", total, follow_path(in, item, path), in.budget());
  }
  return total;
}

Value join_items(I& in, const Value& v, const Arguments& a) {
  const Value path = a.get(1, "attribute", {});
  List parts;
  const auto all = iterate(v, in.budget());
  for (const Value& item : all->items) {
    parts.items.push_back(follow_path(in, item, path));
  }
  return join(parts, to_text(a.get(0, "d", ""), in.budget()), in.budget());
}

Value end_item(I& in, const Value& v, bool last) {
  const auto items = iterate(v, in.budget());
  if (items->items.empty()) {
    return Value::undefined("an empty sequence has no first or last item");
  }
  return last ? items->items.back() : items->items.front();
}

Value reverse(I& in, const Value& v) {
  auto items = iterate(v, in.budget())->items;
  in.budget().charge(items.size());
  std::reverse(items.begin(), items.end());
  if (!v.is_string()) return Value::list(std::move(items));
  std::string text;
  for (const Value& c : items) text += *c.string();
  return text;
}

Value dict_items(I& in, const Value& v) {
  if (v.is_undefined()) return Value::list({});
  if (v.as_dict() == nullptr) fail("items needs a mapping");
  return call_method(in, v, "items", {});
}

}  // namespace

const Filters& list_filters() {
  using V = const Value;
  using A = const Arguments;
  static const Filter kLength = [](I& in, V& v, A&) { return Value(length(v, in.budget())); };
  static const Filters kFilters = {
      {"length", kLength},
      {"count", kLength},
      {"first", [](I& in, V& v, A&) { return end_item(in, v, false); }},
      {"last", [](I& in, V& v, A&) { return end_item(in, v, true); }},
      {"join", join_items},
      {"list",
       [](I& in, V& v, A&) {
         const auto items = iterate(v, in.budget());
         in.budget().charge(items->items.size());
         return Value::list(items->items);
       }},
      {"map", map},
      {"select", [](I& in, V& v, A& a) { return choose(in, v, a, false, true); }},
      {"reject", [](I& in, V& v, A& a) { return choose(in, v, a, false, false); }},
      {"selectattr", [](I& in, V& v, A& a) { return choose(in, v, a, true, true); }},
      {"rejectattr", [](I& in, V& v, A& a) { return choose(in, v, a, true, false); }},
      {"sort", sort},
      {"dictsort", dictsort},
      {"unique", unique},
      {"min", [](I& in, V& v, A& a) { return extreme(in, v, a, false); }},
      {"max", [](I& in, V& v, A& a) { return extreme(in, v, a, true); }},
      {"sum", sum},
      {"reverse", [](I& in, V& v, A&) { return reverse(in, v); }},
      {"items", [](I& in, V& v, A&) { return dict_items(in, v); }},
  };
  return kFilters;
}

}  // namespace sortie::text::jinja
