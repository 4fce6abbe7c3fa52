#include "text/jinja/python.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "text/jinja/strings.h"
#include "text/utf8.h"

namespace sortie::text::jinja {
namespace {

void append(std::string& out, std::string_view text, Budget& budget) {
  budget.charge_bytes(text.size());
  budget.check_bytes(out.size() + text.size());
  out += text;
}

std::string quote(std::string_view text) {
  const bool double_quotes =
      text.find('\'') != std::string_view::npos && text.find('"') == std::string_view::npos;
  const char mark = double_quotes ? '"' : '\'';
  std::string out(1, mark);
  for (const char c : text) {
    const auto byte = static_cast<uint8_t>(c);
    if (c == mark || c == '\\') {
      out += '\\';
      out += c;
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\r') {
      out += "\\r";
    } else if (c == '\t') {
      out += "\\t";
    } else if (byte < 0x20 || byte == 0x7F) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  return out += mark;
}

void append_repr(std::string& out, const Value& value, Budget& budget) {
  if (const std::string* s = value.string()) {
    append(out, quote(*s), budget);
  } else if (const List* list = value.as_list()) {
    append(out, list->tuple ? "(" : "[", budget);
    for (size_t i = 0; i < list->items.size(); ++i) {
      if (i > 0) append(out, ", ", budget);
      append_repr(out, list->items[i], budget);
    }
    append(out, !list->tuple ? "]" : list->items.size() == 1 ? ",)" : ")", budget);
  } else if (const Dict* dict = value.as_dict()) {
    append(out, "{", budget);
    for (size_t i = 0; i < dict->items().size(); ++i) {
      if (i > 0) append(out, ", ", budget);
      append_repr(out, dict->items()[i].first, budget);
      append(out, ": ", budget);
      append_repr(out, dict->items()[i].second, budget);
    }
    append(out, "}", budget);
  } else if (value.is_undefined()) {
    append(out, "Undefined", budget);
  } else {
    append(out, to_text(value, budget), budget);
  }
}

class JsonWriter {
 public:
  JsonWriter(const JsonStyle& style, Budget& budget) : style_(style), budget_(budget) {}

  std::string write(const Value& value) {
    put(value, 0);
    return std::move(out_);
  }

 private:
  void text(std::string_view s) { append(out_, s, budget_); }

  void line(int level) {
    if (style_.indent < 0) return;
    text("\n");
    text(std::string(static_cast<size_t>(style_.indent) * static_cast<size_t>(level), ' '));
  }

  void string(std::string_view s) {
    std::string quoted = "\"";
    while (!s.empty()) {
      const Utf8Step step = utf8_step(s);
      const char32_t c = step.code;
      if (c == '"' || c == '\\') {
        quoted += '\\';
        quoted += static_cast<char>(c);
      } else if (c == '\n') {
        quoted += "\\n";
      } else if (c == '\r') {
        quoted += "\\r";
      } else if (c == '\t') {
        quoted += "\\t";
      } else if (c == '\b') {
        quoted += "\\b";
      } else if (c == '\f') {
        quoted += "\\f";
      } else if (c < 0x20 || (style_.ensure_ascii && c > 0x7E && c < 0x10000)) {
        quoted += fmt::format("\\u{:04x}", static_cast<uint32_t>(c));
      } else if (style_.ensure_ascii && c >= 0x10000) {
        const uint32_t u = static_cast<uint32_t>(c) - 0x10000;
        quoted += fmt::format("\\u{:04x}\\u{:04x}", 0xD800 + (u >> 10), 0xDC00 + (u & 0x3FF));
      } else {
        quoted += s.substr(0, step.length);
      }
      s.remove_prefix(step.length);
    }
    text(quoted + "\"");
  }

  void key(const Value& value) {
    if (const std::string* s = value.string()) {
      string(*s);
    } else if (value.is_number() || value.is_none()) {
      out_ += '"';
      put(value, 0);
      out_ += '"';
    } else {
      fail(fmt::format("keys must be str, int, float, bool or None, not {}", value.type_name()));
    }
  }

  void put(const Value& value, int level) {
    if (value.is_none()) {
      text("null");
    } else if (const bool* b = value.get_if<bool>()) {
      text(*b ? "true" : "false");
    } else if (const double* d = value.get_if<double>()) {
      text(std::isnan(*d)   ? "NaN"
           : std::isinf(*d) ? (*d > 0 ? "Infinity" : "-Infinity")
                            : float_text(*d));
    } else if (value.is_int()) {
      text(to_text(value, budget_));
    } else if (const std::string* s = value.string()) {
      string(*s);
    } else if (const List* list = value.as_list()) {
      bool first = true;
      text("[");
      for (const Value& item : list->items) {
        separate(first, level);
        put(item, level + 1);
      }
      if (!first) line(level);
      text("]");
    } else if (const Dict* dict = value.as_dict()) {
      put_dict(*dict, level);
    } else {
      fail(fmt::format("Object of type {} is not JSON serializable", value.type_name()));
    }
  }

  void put_dict(const Dict& dict, int level) {
    auto items = dict.items();
    if (style_.sort_keys) {
      std::stable_sort(items.begin(), items.end(), [&](const auto& a, const auto& b) {
        return compare(a.first, b.first, budget_) < 0;
      });
    }
    bool first = true;
    text("{");
    for (const auto& [name, item] : items) {
      separate(first, level);
      key(name);
      text(style_.key_separator);
      put(item, level + 1);
    }
    if (!first) line(level);
    text("}");
  }

  void separate(bool& first, int level) {
    if (!first) text(style_.item_separator);
    first = false;
    line(level + 1);
  }

  const JsonStyle& style_;
  Budget& budget_;
  std::string out_;
};

}  // namespace

std::string float_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  char buffer[64];
  const auto end =
      std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::scientific).ptr;
  std::string shortest(buffer, end);
  const size_t e = shortest.find('e');
  const int exponent = std::stoi(shortest.substr(e + 1));
  if (exponent < -4 || exponent >= 16) return shortest;
  const auto fixed =
      std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::fixed).ptr;
  std::string text(buffer, fixed);
  if (text.find('.') == std::string::npos) text += ".0";
  return text;
}

std::string to_text(const Value& value, Budget& budget) {
  if (const std::string* s = value.string()) {
    budget.charge_bytes(s->size());
    return *s;
  }
  if (value.is_undefined()) return {};
  if (value.is_none()) return "None";
  if (const bool* b = value.get_if<bool>()) return *b ? "True" : "False";
  if (const int64_t* i = value.get_if<int64_t>()) return fmt::format("{}", *i);
  if (const double* d = value.get_if<double>()) return float_text(*d);
  if (value.as_list() != nullptr || value.as_dict() != nullptr) return to_repr(value, budget);
  if (const Callable* c = value.as_callable())
    return fmt::format("<{} {}>", value.type_name(), c->name);
  return fmt::format("<{}>", value.type_name());
}

std::string to_repr(const Value& value, Budget& budget) {
  std::string out;
  append_repr(out, value, budget);
  return out;
}

std::string to_json(const Value& value, const JsonStyle& style, Budget& budget) {
  return JsonWriter(style, budget).write(value);
}

bool equal(const Value& a, const Value& b, Budget& budget) {
  budget.charge(1);
  if (a.is_number() && b.is_number()) {
    int64_t x = 0;
    int64_t y = 0;
    return a.whole(x) && b.whole(y) ? x == y : a.number() == b.number();
  }
  const std::string* s = a.string();
  const std::string* t = b.string();
  if (s != nullptr && t != nullptr) {
    budget.charge_bytes(std::min(s->size(), t->size()));
    return *s == *t;
  }
  if (a.is_none() || a.is_undefined()) {
    return a.is_none() == b.is_none() && a.is_undefined() == b.is_undefined();
  }
  const List* l = a.as_list();
  const List* m = b.as_list();
  if (l != nullptr && m != nullptr) {
    if (l->tuple != m->tuple || l->items.size() != m->items.size()) return false;
    for (size_t i = 0; i < l->items.size(); ++i) {
      if (!equal(l->items[i], m->items[i], budget)) return false;
    }
    return true;
  }
  const Dict* d = a.as_dict();
  const Dict* e = b.as_dict();
  if (d != nullptr && e != nullptr) {
    if (d->items().size() != e->items().size()) return false;
    for (const auto& [key, value] : d->items()) {
      const Value* other = e->find(key);
      if (other == nullptr || !equal(value, *other, budget)) return false;
    }
    return true;
  }
  if (Namespace* n = a.as_namespace()) return n == b.as_namespace();
  if (const Loop* n = a.as_loop()) return n == b.as_loop();
  if (const Callable* c = a.as_callable()) return c == b.as_callable();
  return false;
}

int compare(const Value& a, const Value& b, Budget& budget) {
  budget.charge(1);
  if (a.is_number() && b.is_number()) {
    int64_t x = 0;
    int64_t y = 0;
    if (a.whole(x) && b.whole(y)) return x < y ? -1 : x > y ? 1 : 0;
    return a.number() < b.number() ? -1 : a.number() > b.number() ? 1 : 0;
  }
  const std::string* s = a.string();
  const std::string* t = b.string();
  if (s != nullptr && t != nullptr) {  // UTF-8's bytes sort as its characters do
    budget.charge_bytes(std::min(s->size(), t->size()));
    const int order = s->compare(*t);
    return order < 0 ? -1 : order > 0 ? 1 : 0;
  }
  const List* l = a.as_list();
  const List* m = b.as_list();
  if (l != nullptr && m != nullptr && l->tuple == m->tuple) {
    const size_t n = std::min(l->items.size(), m->items.size());
    for (size_t i = 0; i < n; ++i) {
      if (!equal(l->items[i], m->items[i], budget)) {
        return compare(l->items[i], m->items[i], budget);
      }
    }
    return l->items.size() < m->items.size() ? -1 : l->items.size() > m->items.size() ? 1 : 0;
  }
  for (const Value* v : {&a, &b}) {
    if (const auto* u = v->get_if<Value::Undefined>()) fail(*u->what);
  }
  fail(fmt::format("'<' not supported between instances of '{}' and '{}'", a.type_name(),
                   b.type_name()));
}

bool contains(const Value& container, const Value& item, Budget& budget) {
  if (const std::string* s = container.string()) {
    const std::string* part = item.string();
    if (part == nullptr) {
      fail(fmt::format("'in <string>' requires string as left operand, not {}", item.type_name()));
    }
    return find_text(*s, *part, 0, budget) != std::string::npos;
  }
  if (const List* list = container.as_list()) {
    return std::any_of(list->items.begin(), list->items.end(),
                       [&](const Value& v) { return equal(v, item, budget); });
  }
  if (const Dict* dict = container.as_dict()) {
    if (const std::string* s = item.string()) budget.charge_bytes(s->size());
    return dict->find(item) != nullptr;
  }
  if (container.is_undefined()) return false;
  fail(fmt::format("argument of type '{}' is not iterable", container.type_name()));
}

std::shared_ptr<const List> iterate(const Value& value, Budget& budget) {
  if (const auto* list = value.get_if<std::shared_ptr<const List>>()) return *list;
  List result;
  if (const Dict* dict = value.as_dict()) {
    budget.charge(dict->items().size());
    for (const auto& [key, item] : dict->items()) result.items.push_back(key);
    result.depth = dict->depth();
  } else if (const std::string* s = value.string()) {
    std::string_view rest = *s;
    budget.charge(rest.size());
    if (rest.size() > budget.max_items) fail("a text is too long to go through its characters");
    while (!rest.empty()) {
      const size_t n = utf8_step(rest).length;
      result.items.emplace_back(rest.substr(0, n));
      rest.remove_prefix(n);
    }
  } else if (!value.is_undefined()) {
    fail(fmt::format("'{}' object is not iterable", value.type_name()));
  }
  return std::make_shared<const List>(std::move(result));
}

int64_t length(const Value& value, Budget& budget) {
  if (const std::string* s = value.string()) {
    budget.charge_bytes(s->size());
    return static_cast<int64_t>(utf8_length(*s));
  }
  if (const List* list = value.as_list()) return static_cast<int64_t>(list->items.size());
  if (const Dict* dict = value.as_dict()) return static_cast<int64_t>(dict->items().size());
  if (const Loop* loop = value.as_loop()) return static_cast<int64_t>(loop->items->items.size());
  if (value.is_undefined()) return 0;
  fail(fmt::format("object of type '{}' has no len()", value.type_name()));
}

bool resolve_index(int64_t index, size_t size, size_t& out) {
  const auto n = static_cast<int64_t>(size);
  if (index < 0) index += n;
  if (index < 0 || index >= n) return false;
  out = static_cast<size_t>(index);
  return true;
}

Value slice(const Value& sequence, const Value& begin, const Value& end, const Value& step_value,
            Budget& budget) {
  const std::string* text = sequence.string();
  const List* list = sequence.as_list();
  if (text == nullptr && list == nullptr) {
    if (const auto* u = sequence.get_if<Value::Undefined>()) fail(*u->what);
    fail(fmt::format("'{}' object cannot be sliced", sequence.type_name()));
  }
  const int64_t n = length(sequence, budget);
  const auto bound = [&](const Value& value, int64_t otherwise, int64_t low, int64_t high) {
    if (value.is_none()) return otherwise;
    int64_t i = 0;
    if (!value.whole(i)) fail("slice indices must be integers or None");
    if (i < 0) i = i < -n ? low : i + n;
    return std::clamp(i, low, high);
  };
  int64_t step = 1;
  if (!step_value.is_none() && !step_value.whole(step)) fail("slice steps must be integers");
  if (step == 0) fail("slice step cannot be zero");
  const bool forward = step > 0;
  int64_t i = forward ? bound(begin, 0, 0, n) : bound(begin, n - 1, -1, n - 1);
  const int64_t stop = forward ? bound(end, n, 0, n) : bound(end, -1, -1, n - 1);
  if (text != nullptr && step == 1) {
    budget.charge_bytes(text->size());
    if (i >= stop) return "";
    const size_t from = utf8_offset(*text, static_cast<size_t>(i));
    const std::string_view rest = std::string_view(*text).substr(from);
    return rest.substr(0, utf8_offset(rest, static_cast<size_t>(stop - i)));
  }
  const auto items = iterate(sequence, budget);
  std::vector<Value> picked;
  // A step past the length ends the walk; clamping it keeps i + step from overflowing.
  step = std::clamp(step, -n - 1, n + 1);
  for (; forward ? i < stop : i > stop; i += step) {
    picked.push_back(items->items[static_cast<size_t>(i)]);
  }
  budget.charge(picked.size());
  if (text == nullptr) return Value::list(std::move(picked), list->tuple);
  std::string joined;
  for (const Value& c : picked) joined += *c.string();
  return joined;
}

}  // namespace sortie::text::jinja
