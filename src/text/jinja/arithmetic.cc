#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "text/jinja/python.h"

namespace sortie::text::jinja {
namespace {

[[noreturn]] void unsupported(std::string_view op, const Value& a, const Value& b) {
  for (const Value* v : {&a, &b}) {
    if (const auto* u = v->get_if<Value::Undefined>()) fail(*u->what);
  }
  if (op == "+" && a.is_string()) {
    fail(fmt::format("can only concatenate str (not \"{}\") to str", b.type_name()));
  }
  fail(fmt::format("unsupported operand type(s) for {}: '{}' and '{}'", op, a.type_name(),
                   b.type_name()));
}

Value integer_power(int64_t base, int64_t exponent) {
  int64_t result = 1;
  while (exponent > 0) {
    if ((exponent & 1) != 0 && __builtin_mul_overflow(result, base, &result)) {
      fail("an integer is too large");
    }
    exponent >>= 1;
    if (exponent > 0 && __builtin_mul_overflow(base, base, &base)) fail("an integer is too large");
  }
  return result;
}

Value integers(std::string_view op, int64_t a, int64_t b) {
  int64_t r = 0;
  bool overflow = false;
  if (op == "+") {
    overflow = __builtin_add_overflow(a, b, &r);
  } else if (op == "-") {
    overflow = __builtin_sub_overflow(a, b, &r);
  } else if (op == "*") {
    overflow = __builtin_mul_overflow(a, b, &r);
  } else if (op == "**") {
    if (b < 0) return std::pow(static_cast<double>(a), static_cast<double>(b));
    return integer_power(a, b);
  } else {
    if (b == 0) fail("division by zero");
    if (op == "/") return static_cast<double>(a) / static_cast<double>(b);
    if (b == -1) {  // the only quotient that can overflow
      if (op == "%") return int64_t{0};
      overflow = __builtin_sub_overflow(int64_t{0}, a, &r);
    } else {
      // Python rounds the quotient down, and the remainder has the divisor's sign.
      int64_t remainder = a % b;
      r = a / b;
      if (remainder != 0 && (remainder < 0) != (b < 0)) {
        remainder += b;
        --r;
      }
      if (op == "%") return remainder;
    }
  }
  if (overflow) fail("an integer is too large");
  return r;
}

Value floats(std::string_view op, double a, double b) {
  if (op == "+") return a + b;
  if (op == "-") return a - b;
  if (op == "*") return a * b;
  if (op == "**") return std::pow(a, b);
  if (b == 0) fail("float division by zero");
  if (op == "/") return a / b;
  double remainder = std::fmod(a, b);
  if (remainder != 0 && (remainder < 0) != (b < 0)) remainder += b;
  if (op == "%") return remainder;
  return std::floor(a / b);
}

Value repeat(const Value& sequence, int64_t count, Budget& budget) {
  const auto n = static_cast<size_t>(std::max<int64_t>(0, count));
  if (const std::string* s = sequence.string()) {
    if (!s->empty() && n > budget.max_bytes / s->size()) budget.check_bytes(budget.max_bytes + 1);
    budget.charge_bytes(n * s->size());
    std::string out;
    out.reserve(n * s->size());
    for (size_t i = 0; i < n && !s->empty(); ++i) out += *s;
    return out;
  }
  const List& list = *sequence.as_list();
  if (!list.items.empty() && n > budget.max_items / list.items.size()) fail("a list is too long");
  budget.charge(n * list.items.size());
  std::vector<Value> items;
  for (size_t i = 0; i < n && !list.items.empty(); ++i) {
    items.insert(items.end(), list.items.begin(), list.items.end());
  }
  return Value::list(std::move(items), list.tuple);
}

Value add(const Value& a, const Value& b, Budget& budget) {
  const std::string* s = a.string();
  const std::string* t = b.string();
  if (s != nullptr && t != nullptr) {
    budget.check_bytes(s->size() + t->size());
    budget.charge_bytes(s->size() + t->size());
    return *s + *t;
  }
  const List* l = a.as_list();
  const List* m = b.as_list();
  if (l == nullptr || m == nullptr || l->tuple != m->tuple) unsupported("+", a, b);
  budget.charge(1 + l->items.size() + m->items.size());
  if (l->items.size() + m->items.size() > budget.max_items) fail("a list is too long");
  std::vector<Value> items = l->items;
  items.insert(items.end(), m->items.begin(), m->items.end());
  return Value::list(std::move(items), l->tuple);
}

}  // namespace

Value arithmetic(std::string_view op, const Value& a, const Value& b, Budget& budget) {
  int64_t x = 0;
  int64_t y = 0;
  if (a.whole(x) && b.whole(y)) return integers(op, x, y);
  if (a.is_number() && b.is_number()) return floats(op, a.number(), b.number());
  if (op == "+") return add(a, b, budget);
  if (op == "*" && (a.is_string() || a.as_list() != nullptr) && b.whole(y)) {
    return repeat(a, y, budget);
  }
  if (op == "*" && (b.is_string() || b.as_list() != nullptr) && a.whole(x)) {
    return repeat(b, x, budget);
  }
  if (op == "%" && a.is_string()) return percent_format(*a.string(), b, budget);
  unsupported(op, a, b);
}

Value percent_format(const std::string& format, const Value& arguments, Budget& budget) {
  const List* list = arguments.as_list();
  const bool tuple = list != nullptr && list->tuple;
  const size_t count = tuple ? list->items.size() : 1;
  size_t used = 0;
  std::string out;
  for (size_t i = 0; i < format.size(); ++i) {
    if (format[i] != '%') {
      out += format[i];
      continue;
    }
    int precision = -1;
    if (++i < format.size() && format[i] == '.') {
      precision = 0;
      while (++i < format.size() && format[i] >= '0' && format[i] <= '9') {
        precision = std::min(precision * 10 + (format[i] - '0'), 1000);
      }
    }
    if (i >= format.size()) fail("incomplete format");
    if (format[i] == '%') {
      out += '%';
      continue;
    }
    if (used >= count) fail("not enough arguments for format string");
    const Value& value = tuple ? list->items[used] : arguments;
    ++used;
    if (format[i] == 's') {
      out += to_text(value, budget);
    } else if (format[i] == 'r') {
      out += to_repr(value, budget);
    } else if (!value.is_number()) {
      fail(fmt::format("%{} format: a number is required, not {}", format[i], value.type_name()));
    } else if (format[i] == 'd' || format[i] == 'i') {
      int64_t whole = 0;
      out += value.whole(whole) ? fmt::format("{}", whole)
                                : fmt::format("{:.0f}", std::trunc(value.number()));
    } else if (format[i] == 'f') {
      out += fmt::format("{:.{}f}", value.number(), precision < 0 ? 6 : std::min(precision, 100));
    } else {
      fail(fmt::format("the format %{} is not supported", format[i]));
    }
    budget.check_bytes(out.size());
  }
  if (tuple && used < count) fail("not all arguments converted during string formatting");
  budget.charge_bytes(out.size() + format.size());
  return out;
}

}  // namespace sortie::text::jinja
