#pragma once

#include <ctime>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "text/jinja/ast.h"
#include "text/jinja/value.h"

namespace sortie::text::jinja {

// The arguments of a call.
struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;

  // The argument in this place or of this name; null if it was not given.
  const Value* find(size_t place, std::string_view name) const;
  Value get(size_t place, std::string_view name, const Value& otherwise) const;
  int64_t whole(size_t place, std::string_view name, int64_t otherwise) const;
  bool truthy(size_t place, std::string_view name, bool otherwise) const;
};

// Variables of the template, a loop's turn, a macro's call.
struct Scope {
  Scope* parent = nullptr;
  std::unordered_map<std::string_view, Value> variables;
  bool captured = false;  // a macro that was defined in it may be called later
};

// Renders one parsed template once. Throws TemplateError; line() then says where.
class Interpreter {
 public:
  // `now` is what strftime_now() tells, in local time.
  Interpreter(const Budget& budget, std::time_t now) : budget_(budget), now_(now) {}
  ~Interpreter();
  Interpreter(const Interpreter&) = delete;
  Interpreter& operator=(const Interpreter&) = delete;

  std::string render(const Body& body, const Dict& context);

  int line() const { return line_; }
  Budget& budget() { return budget_; }
  std::time_t now() const { return now_; }

  Value evaluate(const Expression& expression);
  Value call(const Value& callee, const Arguments& arguments);
  // x.name and x[key] as jinja2 looks them up: undefined where there is none.
  Value attribute(const Value& value, std::string_view name);
  Value subscript(const Value& value, const Value& key);
  Value filter(std::string_view name, const Value& input, const Arguments& arguments);
  bool test(std::string_view name, const Value& value, const Arguments& arguments);
  Value make_namespace(const std::vector<std::pair<std::string, Value>>& items);

 private:
  enum class Flow { kNormal, kBreak, kContinue };
  class NewScope;
  // Bounds the recursion over expressions, blocks and macros together.
  class Depth {
   public:
    explicit Depth(int& depth) : depth_(depth) {
      if (++depth_ > kMaxDepth) fail("the template's expressions nest too deep");
    }
    ~Depth() { --depth_; }
    Depth(const Depth&) = delete;
    Depth& operator=(const Depth&) = delete;

   private:
    static constexpr int kMaxDepth = 600;
    int& depth_;
  };

  Flow run(const Body& body);
  Flow run(const Statement& statement);
  Flow run_if(const Statement& statement);
  Flow run_for(const Statement& statement);
  Flow run_turns(const Statement& statement, const std::shared_ptr<const List>& items);
  std::shared_ptr<const List> filtered(const Statement& statement,
                                       const std::shared_ptr<const List>& items);
  Flow run_scoped(const Body& body);
  void run_with(const Statement& statement);
  void run_call_block(const Statement& statement);
  std::string capture(const Body& body);
  Value define(const MacroStatement& macro);
  void assign(const Target& target, const Value& value);
  void write(std::string_view text);

  Value lookup(const std::string& name);
  Value chain(const Expression& expression);
  Value follow(const Value& value, const Link& link);
  Value arithmetic_chain(const Expression& expression);
  bool comparison(const Expression& expression);
  Value concatenation(const Expression& expression);
  Value negated(const Expression& expression);
  Value dict(const Expression& expression);
  std::vector<Value> items(const Expression& expression);
  Arguments arguments(const std::vector<Argument>& list);
  Value call_macro(const Callable& callee, const Arguments& arguments);

  Budget budget_;
  const std::time_t now_;
  int line_ = 0;
  int depth_ = 0;
  int calls_ = 0;
  Scope* scope_ = nullptr;
  std::string* out_ = nullptr;
  Value captured_;  // of the block that is being filtered
  std::vector<std::unique_ptr<Scope>> kept_;
  std::vector<std::shared_ptr<Namespace>> namespaces_;
};

// Global functions, methods of values: Callables without a macro.
bool is_function(std::string_view name);
Value call_function(Interpreter& interpreter, std::string_view name, const Arguments& arguments);
bool has_method(const Value& value, std::string_view name);
Value call_method(Interpreter& interpreter, const Value& self, std::string_view name,
                  const Arguments& arguments);

}  // namespace sortie::text::jinja
