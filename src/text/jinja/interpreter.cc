#include "text/jinja/interpreter.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "text/jinja/python.h"

namespace sortie::text::jinja {

// A scope for the time of a block. One that a macro refers to stays until the rendering ends.
class Interpreter::NewScope {
 public:
  explicit NewScope(Interpreter& interpreter) : NewScope(interpreter, interpreter.scope_) {}
  NewScope(Interpreter& interpreter, Scope* parent)
      : interpreter_(interpreter), before_(interpreter.scope_) {
    open(parent);
  }
  ~NewScope() { close(); }
  NewScope(const NewScope&) = delete;
  NewScope& operator=(const NewScope&) = delete;

  Scope& operator*() { return *scope_; }

  // Forgets the variables, for a loop's next turn.
  void renew() {
    if (!scope_->captured) {
      scope_->variables.clear();
      return;
    }
    Scope* parent = scope_->parent;
    close();
    open(parent);
  }

 private:
  void open(Scope* parent) {
    scope_ = std::make_unique<Scope>();
    scope_->parent = parent;
    interpreter_.scope_ = scope_.get();
  }
  void close() {
    interpreter_.scope_ = before_;
    if (scope_->captured) interpreter_.kept_.push_back(std::move(scope_));
  }

  Interpreter& interpreter_;
  Scope* before_;
  std::unique_ptr<Scope> scope_;
};

Interpreter::~Interpreter() {
  for (const auto& space : namespaces_) space->items.clear();  // they may hold each other
}

std::string Interpreter::render(const Body& body, const Dict& context) {
  Scope root;
  for (const auto& [key, value] : context.items()) {
    if (key.string() != nullptr) root.variables.emplace(*key.string(), value);
  }
  scope_ = &root;
  std::string out;
  out_ = &out;
  run(body);
  return out;
}

void Interpreter::write(std::string_view text) {
  budget_.charge_bytes(text.size());
  budget_.check_bytes(out_->size() + text.size());
  *out_ += text;
}

std::string Interpreter::capture(const Body& body) {
  std::string text;
  std::string* before = std::exchange(out_, &text);
  run(body);
  out_ = before;
  return text;
}

Interpreter::Flow Interpreter::run(const Body& body) {
  const Depth depth(depth_);
  for (const StatementPtr& statement : body) {
    const Flow flow = run(*statement);
    if (flow != Flow::kNormal) return flow;
  }
  return Flow::kNormal;
}

Interpreter::Flow Interpreter::run_scoped(const Body& body) {
  const NewScope scope(*this);
  return run(body);
}

Interpreter::Flow Interpreter::run(const Statement& statement) {
  budget_.charge(1);
  line_ = statement.line;
  switch (statement.kind) {
    case Statement::kText:
      write(statement.text);
      break;
    case Statement::kOutput:
      write(to_text(evaluate(*statement.value), budget_));
      break;
    case Statement::kIf:
      return run_if(statement);
    case Statement::kFor:
      return run_for(statement);
    case Statement::kSet:
      assign(statement.assignments[0].first, evaluate(*statement.assignments[0].second));
      break;
    case Statement::kSetBlock:
    case Statement::kFilterBlock: {
      Value text;
      {
        const NewScope scope(*this);
        text = capture(statement.body);
      }
      if (statement.value != nullptr) {
        const Value before = std::exchange(captured_, text);
        text = evaluate(*statement.value);
        captured_ = before;
      }
      if (statement.kind == Statement::kSetBlock) {
        assign(statement.assignments[0].first, text);
      } else {
        write(to_text(text, budget_));
      }
      break;
    }
    case Statement::kMacro:
      scope_->variables[statement.macro.name] = define(statement.macro);
      break;
    case Statement::kCallBlock:
      run_call_block(statement);
      break;
    case Statement::kWith:
      run_with(statement);
      break;
    case Statement::kGeneration:
      return run_scoped(statement.body);
    case Statement::kBreak:
      return Flow::kBreak;
    case Statement::kContinue:
      return Flow::kContinue;
  }
  return Flow::kNormal;
}

Interpreter::Flow Interpreter::run_if(const Statement& statement) {
  for (const auto& [condition, body] : statement.branches) {
    if (condition == nullptr || evaluate(*condition).truthy()) return run(body);
  }
  return Flow::kNormal;
}

Interpreter::Flow Interpreter::run_for(const Statement& statement) {
  auto items = iterate(evaluate(*statement.value), budget_);
  if (statement.condition != nullptr) items = filtered(statement, items);
  if (items->items.empty()) return run_scoped(statement.otherwise);
  return run_turns(statement, items);
}

std::shared_ptr<const List> Interpreter::filtered(const Statement& statement,
                                                  const std::shared_ptr<const List>& items) {
  NewScope scope(*this);
  List kept{.items = {}, .tuple = false, .depth = items->depth};
  for (const Value& item : items->items) {
    scope.renew();
    assign(statement.assignments[0].first, item);
    if (evaluate(*statement.condition).truthy()) kept.items.push_back(item);
  }
  return std::make_shared<const List>(std::move(kept));
}

Interpreter::Flow Interpreter::run_turns(const Statement& statement,
                                         const std::shared_ptr<const List>& items) {
  NewScope scope(*this);
  for (size_t i = 0; i < items->items.size(); ++i) {
    budget_.charge(1);
    scope.renew();
    (*scope).variables["loop"] = std::make_shared<const Loop>(Loop{items, i});
    assign(statement.assignments[0].first, items->items[i]);
    if (run(statement.body) == Flow::kBreak) break;
  }
  return Flow::kNormal;
}

void Interpreter::run_with(const Statement& statement) {
  std::vector<Value> values;  // all are computed before any is set
  for (const auto& [target, value] : statement.assignments) values.push_back(evaluate(*value));
  const NewScope scope(*this);
  for (size_t i = 0; i < values.size(); ++i) assign(statement.assignments[i].first, values[i]);
  run(statement.body);
}

Value Interpreter::define(const MacroStatement& macro) {
  for (Scope* scope = scope_; scope != nullptr && !scope->captured; scope = scope->parent) {
    scope->captured = true;
  }
  return std::make_shared<const Callable>(
      Callable{.name = macro.name, .self = {}, .macro = &macro, .scope = scope_});
}

void Interpreter::run_call_block(const Statement& statement) {
  const Expression& call_expression = *statement.value;
  Value callee = evaluate(*call_expression.children[0]);
  for (size_t i = 0; i + 1 < call_expression.links.size(); ++i) {
    callee = follow(callee, call_expression.links[i]);
  }
  Arguments given = arguments(call_expression.links.back().arguments);
  given.named.emplace_back("caller", define(statement.macro));
  write(to_text(call(callee, given), budget_));
}

void Interpreter::assign(const Target& target, const Value& value) {
  if (!target.parts.empty()) {
    const auto items = iterate(value, budget_);
    if (items->items.size() != target.parts.size()) {
      fail(fmt::format("{} values cannot be unpacked into {} names", items->items.size(),
                       target.parts.size()));
    }
    for (size_t i = 0; i < target.parts.size(); ++i) assign(target.parts[i], items->items[i]);
    return;
  }
  budget_.charge_bytes(target.name.size() + target.attribute.size());
  if (target.attribute.empty()) {
    scope_->variables[target.name] = value;
    return;
  }
  Namespace* space = lookup(target.name).as_namespace();
  if (space == nullptr) fail("cannot assign an attribute on a value that is not a namespace");
  budget_.charge(space->items.size() / 16);
  if (Value* there = space->find(target.attribute)) {
    *there = value;
  } else {
    space->items.emplace_back(target.attribute, value);
  }
}

Value Interpreter::make_namespace(const std::vector<std::pair<std::string, Value>>& items) {
  budget_.charge(50 + items.size());  // they live until the end
  auto space = std::make_shared<Namespace>();
  for (const auto& [name, value] : items) {
    if (Value* there = space->find(name)) {
      *there = value;
    } else {
      space->items.emplace_back(name, value);
    }
  }
  namespaces_.push_back(space);
  return space;
}

Value Interpreter::call_macro(const Callable& callee, const Arguments& given) {
  if (++calls_ > budget_.max_calls) fail("macros call each other too deep");
  const MacroStatement& macro = *callee.macro;
  Value result;
  {
    NewScope scope(*this, callee.scope);
    auto& variables = (*scope).variables;
    size_t place = 0;
    for (const auto& [name, otherwise] : macro.parameters) {
      if (const Value* value = given.find(place++, name)) {
        variables[name] = *value;
      } else {
        variables[name] =
            otherwise != nullptr
                ? evaluate(*otherwise)
                : Value::undefined(fmt::format("parameter '{}' was not provided", name));
      }
    }
    std::vector<Value> more(given.positional.begin() + static_cast<std::ptrdiff_t>(std::min(
                                                           place, given.positional.size())),
                            given.positional.end());
    variables["varargs"] = Value::list(std::move(more), true);
    auto named = std::make_shared<Dict>();
    for (const auto& [name, value] : given.named) {
      const bool parameter = std::any_of(macro.parameters.begin(), macro.parameters.end(),
                                         [&n = name](const auto& p) { return p.first == n; });
      if (name == "caller") {
        variables["caller"] = value;
      } else if (!parameter) {
        named->set(name, value);
      }
    }
    variables["kwargs"] = std::shared_ptr<const Dict>(std::move(named));
    result = capture(macro.body);
  }
  --calls_;
  return result;
}

}  // namespace sortie::text::jinja
