#include <fmt/format.h>

#include "text/jinja/interpreter.h"
#include "text/jinja/python.h"
#include "text/utf8.h"

namespace sortie::text::jinja {

const Value* Arguments::find(size_t place, std::string_view name) const {
  if (place < positional.size()) return &positional[place];
  for (const auto& [key, value] : named) {
    if (key == name) return &value;
  }
  return nullptr;
}

Value Arguments::get(size_t place, std::string_view name, const Value& otherwise) const {
  const Value* value = find(place, name);
  return value == nullptr ? otherwise : *value;
}

int64_t Arguments::whole(size_t place, std::string_view name, int64_t otherwise) const {
  const Value* value = find(place, name);
  if (value == nullptr || value->is_none()) return otherwise;
  int64_t result = 0;
  if (!value->whole(result)) {
    fail(fmt::format("'{}' must be an integer, not {}", name, value->type_name()));
  }
  return result;
}

bool Arguments::truthy(size_t place, std::string_view name, bool otherwise) const {
  const Value* value = find(place, name);
  return value == nullptr ? otherwise : value->truthy();
}

Value Interpreter::evaluate(const Expression& e) {
  const Depth depth(depth_);
  budget_.charge(1);
  line_ = e.line;
  switch (e.kind) {
    case Expression::kLiteral:
      return e.literal;
    case Expression::kName:
      return lookup(e.name);
    case Expression::kList:
      return Value::list(items(e));
    case Expression::kTuple:
      return Value::list(items(e), true);
    case Expression::kDict:
      return dict(e);
    case Expression::kChain:
      return chain(e);
    case Expression::kArithmetic:
      return arithmetic_chain(e);
    case Expression::kCompare:
      return comparison(e);
    case Expression::kConcat:
      return concatenation(e);
    case Expression::kAnd:
    case Expression::kOr: {
      Value value;
      for (const ExpressionPtr& operand : e.children) {
        value = evaluate(*operand);
        if (value.truthy() == (e.kind == Expression::kOr)) break;
      }
      return value;
    }
    case Expression::kNot:
      return !evaluate(*e.children[0]).truthy();
    case Expression::kNegate:
    case Expression::kPlus:
      return negated(e);
    case Expression::kCondition:
      if (evaluate(*e.children[1]).truthy()) return evaluate(*e.children[0]);
      if (e.children[2] != nullptr) return evaluate(*e.children[2]);
      return Value::undefined("an inline if without else was false and gave no value");
    case Expression::kCaptured:
      return captured_;
  }
  return {};
}

Value Interpreter::lookup(const std::string& name) {
  budget_.charge_bytes(name.size());
  for (const Scope* scope = scope_; scope != nullptr; scope = scope->parent) {
    const auto it = scope->variables.find(name);
    if (it != scope->variables.end()) return it->second;
  }
  if (is_function(name)) {
    return std::make_shared<const Callable>(Callable{.name = name, .self = {}});
  }
  return Value::undefined(fmt::format("'{}' is undefined", name));
}

std::vector<Value> Interpreter::items(const Expression& e) {
  std::vector<Value> result;
  result.reserve(e.children.size());
  for (const ExpressionPtr& child : e.children) result.push_back(evaluate(*child));
  return result;
}

Value Interpreter::dict(const Expression& e) {
  auto result = std::make_shared<Dict>();
  for (size_t i = 0; i + 1 < e.children.size(); i += 2) {
    Value key = evaluate(*e.children[i]);
    if (const std::string* s = key.string()) budget_.charge_bytes(s->size());
    result->set(std::move(key), evaluate(*e.children[i + 1]));
  }
  return std::shared_ptr<const Dict>(std::move(result));
}

Value Interpreter::chain(const Expression& e) {
  Value value = evaluate(*e.children[0]);
  for (const Link& link : e.links) value = follow(value, link);
  return value;
}

Value Interpreter::follow(const Value& value, const Link& link) {
  budget_.charge(1);
  line_ = link.line;
  switch (link.kind) {
    case Link::kAttribute:
      return attribute(value, link.name);
    case Link::kSubscript:
      return subscript(value, evaluate(*link.arguments[0].value));
    case Link::kSlice: {
      Value bounds[3];
      for (size_t i = 0; i < 3; ++i) {
        if (link.arguments[i].value != nullptr) bounds[i] = evaluate(*link.arguments[i].value);
      }
      return slice(value, bounds[0], bounds[1], bounds[2], budget_);
    }
    case Link::kCall: {
      const Arguments given = arguments(link.arguments);
      line_ = link.line;
      return call(value, given);
    }
    case Link::kFilter: {
      const Arguments given = arguments(link.arguments);
      line_ = link.line;
      return filter(link.name, value, given);
    }
    case Link::kTest:
      return test(link.name, value, arguments(link.arguments)) != link.negated;
    case Link::kOperator:
      break;
  }
  return {};
}

Arguments Interpreter::arguments(const std::vector<Argument>& list) {
  Arguments result;
  for (const Argument& argument : list) {
    Value value = evaluate(*argument.value);
    budget_.charge_bytes(argument.name.size());
    if (argument.name.empty()) {
      result.positional.push_back(std::move(value));
    } else {
      result.named.emplace_back(argument.name, std::move(value));
    }
  }
  return result;
}

Value Interpreter::arithmetic_chain(const Expression& e) {
  Value value = evaluate(*e.children[0]);
  for (const Link& link : e.links) {
    const Value operand = evaluate(*link.operand);
    line_ = link.line;
    value = arithmetic(link.name, value, operand, budget_);
  }
  return value;
}

bool Interpreter::comparison(const Expression& e) {
  Value left = evaluate(*e.children[0]);
  for (const Link& link : e.links) {
    Value right = evaluate(*link.operand);
    line_ = link.line;
    const std::string& op = link.name;
    const bool holds = op == "=="       ? equal(left, right, budget_)
                       : op == "!="     ? !equal(left, right, budget_)
                       : op == "in"     ? contains(right, left, budget_)
                       : op == "not in" ? !contains(right, left, budget_)
                       : op == "<"      ? compare(left, right, budget_) < 0
                       : op == "<="     ? compare(left, right, budget_) <= 0
                       : op == ">"      ? compare(left, right, budget_) > 0
                                        : compare(left, right, budget_) >= 0;
    if (!holds) return false;
    left = std::move(right);
  }
  return true;
}

Value Interpreter::concatenation(const Expression& e) {
  std::string text;
  for (const ExpressionPtr& part : e.children) {
    text += to_text(evaluate(*part), budget_);
    budget_.check_bytes(text.size());
  }
  return text;
}

Value Interpreter::negated(const Expression& e) {
  const Value value = evaluate(*e.children[0]);
  if (const auto* u = value.get_if<Value::Undefined>()) fail(*u->what);
  if (!value.is_number()) {
    fail(fmt::format("bad operand type for a sign: '{}'", value.type_name()));
  }
  if (const double* d = value.get_if<double>()) return e.kind == Expression::kNegate ? -*d : *d;
  return arithmetic(e.kind == Expression::kNegate ? "-" : "+", int64_t{0}, value, budget_);
}

Value Interpreter::call(const Value& callee, const Arguments& given) {
  const Callable* callable = callee.as_callable();
  if (callable == nullptr) {
    if (const auto* u = callee.get_if<Value::Undefined>()) fail(*u->what);
    fail(fmt::format("'{}' object is not callable", callee.type_name()));
  }
  if (callable->macro != nullptr) return call_macro(*callable, given);
  if (callable->method) return call_method(*this, callable->self, callable->name, given);
  return call_function(*this, callable->name, given);
}

namespace {

Value loop_attribute(const Loop& loop, std::string_view name) {
  const auto& items = loop.items->items;
  const auto index = static_cast<int64_t>(loop.index);
  const auto count = static_cast<int64_t>(items.size());
  if (name == "index") return index + 1;
  if (name == "index0") return index;
  if (name == "revindex") return count - index;
  if (name == "revindex0") return count - index - 1;
  if (name == "first") return index == 0;
  if (name == "last") return index + 1 == count;
  if (name == "length") return count;
  if (name == "depth") return int64_t{1};
  if (name == "depth0") return int64_t{0};
  if (name == "previtem" && index > 0) return items[loop.index - 1];
  if (name == "nextitem" && index + 1 < count) return items[loop.index + 1];
  return Value::undefined(fmt::format("there is no {} here", name));
}

}  // namespace

Value Interpreter::attribute(const Value& value, std::string_view name) {
  budget_.charge_bytes(name.size());
  if (const auto* u = value.get_if<Value::Undefined>()) fail(*u->what);
  if (has_method(value, name)) {
    return std::make_shared<const Callable>(
        Callable{.name = std::string(name), .self = value, .method = true});
  }
  if (const Loop* loop = value.as_loop()) return loop_attribute(*loop, name);
  if (Namespace* space = value.as_namespace()) {
    budget_.charge(space->items.size() / 16);
    if (const Value* found = space->find(name)) return *found;
  }
  if (const Dict* dict = value.as_dict()) {
    if (const Value* found = dict->find(name)) return *found;
  }
  return Value::undefined(
      fmt::format("'{} object' has no attribute '{}'", value.type_name(), name));
}

Value Interpreter::subscript(const Value& value, const Value& key) {
  if (const auto* u = value.get_if<Value::Undefined>()) fail(*u->what);
  if (const std::string* s = key.string()) budget_.charge_bytes(s->size());
  int64_t index = 0;
  size_t at = 0;
  if (const Dict* dict = value.as_dict()) {
    if (const Value* found = dict->find(key)) return *found;
  } else if (const List* list = value.as_list(); list != nullptr && key.whole(index)) {
    if (resolve_index(index, list->items.size(), at)) return list->items[at];
    return Value::undefined(fmt::format("list index {} is out of range", index));
  } else if (const std::string* text = value.string(); text != nullptr && key.whole(index)) {
    const int64_t n = length(value, budget_);
    if (!resolve_index(index, static_cast<size_t>(n), at)) {
      return Value::undefined(fmt::format("string index {} is out of range", index));
    }
    const std::string_view rest = std::string_view(*text).substr(utf8_offset(*text, at));
    return rest.substr(0, utf8_step(rest).length);
  }
  if (const std::string* name = key.string()) return attribute(value, *name);
  return Value::undefined(
      fmt::format("'{} object' has no item {}", value.type_name(), to_repr(key, budget_)));
}

}  // namespace sortie::text::jinja
