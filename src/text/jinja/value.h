#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

// What template expressions compute with. Values behave as Python's do under jinja2. All but
// namespaces are immutable, so values share their storage freely and form no cycles.
namespace sortie::text::jinja {

// How a template fails; caught where a template is parsed or rendered. Line 0: not known yet.
struct TemplateError {
  std::string message;
  int line = 0;
};
[[noreturn]] void fail(std::string message, int line = 0);

// What a rendering may still spend. Every step and every stretch of data counts, so that a template
// ends within seconds whatever it says.
struct Budget {
  int64_t steps = 40'000'000;
  size_t max_bytes = size_t{16} << 20;  // of one string
  size_t max_items = 1'000'000;         // of one list
  int max_calls = 40;                   // macros within macros
  void charge(size_t units);
  // A string is about to have this many bytes.
  void check_bytes(size_t bytes) const;
  // Making or reading `bytes` bytes.
  void charge_bytes(size_t bytes) { charge(1 + bytes / 16); }
  // Looking for `part` bytes in `text` bytes, at worst.
  void charge_search(size_t text, size_t part) {
    charge(1 + text / 16 * (1 + std::min<size_t>(part, 256) / 32));
  }
};

// Lists within lists; bounds every recursion over values.
constexpr int kMaxValueDepth = 100;

struct List;
struct Namespace;
struct Loop;
struct Callable;
class Dict;

class Value {
 public:
  struct Undefined {
    std::shared_ptr<const std::string> what;  // "'x' is undefined", without the quotes' "is …"
  };
  struct None {};

  Value() : v_(None{}) {}
  Value(bool b) : v_(b) {}     // NOLINT
  Value(int64_t i) : v_(i) {}  // NOLINT
  Value(double d) : v_(d) {}   // NOLINT
  Value(std::string s)         // NOLINT
      : v_(std::make_shared<const std::string>(std::move(s))) {}
  Value(std::string_view s) : Value(std::string(s)) {}            // NOLINT
  Value(const char* s) : Value(std::string(s)) {}                 // NOLINT
  Value(std::shared_ptr<const List> l) : v_(std::move(l)) {}      // NOLINT
  Value(std::shared_ptr<const Dict> d) : v_(std::move(d)) {}      // NOLINT
  Value(std::shared_ptr<Namespace> n) : v_(std::move(n)) {}       // NOLINT
  Value(std::shared_ptr<const Loop> l) : v_(std::move(l)) {}      // NOLINT
  Value(std::shared_ptr<const Callable> c) : v_(std::move(c)) {}  // NOLINT
  template <typename T>
  Value(T*) = delete;  // a pointer is not a bool

  static Value undefined(std::string what);
  static Value list(std::vector<Value> items, bool tuple = false);
  static Value from_json(const nlohmann::ordered_json& json, int depth = 0);

  template <typename T>
  const T* get_if() const {
    return std::get_if<T>(&v_);
  }
  bool is_undefined() const { return get_if<Undefined>() != nullptr; }
  bool is_none() const { return get_if<None>() != nullptr; }
  bool is_bool() const { return get_if<bool>() != nullptr; }
  bool is_int() const { return get_if<int64_t>() != nullptr; }
  bool is_float() const { return get_if<double>() != nullptr; }
  bool is_number() const { return is_bool() || is_int() || is_float(); }
  bool is_string() const { return get_if<std::shared_ptr<const std::string>>() != nullptr; }
  // Null unless it is one.
  const std::string* string() const { return pointer<const std::string>(); }
  const List* as_list() const { return pointer<const List>(); }
  const Dict* as_dict() const { return pointer<const Dict>(); }
  Namespace* as_namespace() const { return pointer<Namespace>(); }
  const Loop* as_loop() const { return pointer<const Loop>(); }
  const Callable* as_callable() const { return pointer<const Callable>(); }

  // bool and int; nothing else counts as whole.
  bool whole(int64_t& out) const;
  double number() const;  // of a number

  bool truthy() const;
  std::string type_name() const;  // Python's
  int depth() const;              // how deep lists nest in it

 private:
  template <typename T>
  T* pointer() const {
    const auto* p = std::get_if<std::shared_ptr<T>>(&v_);
    return p == nullptr ? nullptr : p->get();
  }

  std::variant<Undefined, None, bool, int64_t, double, std::shared_ptr<const std::string>,
               std::shared_ptr<const List>, std::shared_ptr<const Dict>, std::shared_ptr<Namespace>,
               std::shared_ptr<const Loop>, std::shared_ptr<const Callable>>
      v_;
};

struct List {
  std::vector<Value> items;
  bool tuple = false;
  int depth = 1;
};

// Keeps its keys in order.
class Dict {
 public:
  // The later of two equal keys wins, in the earlier one's place.
  void set(Value key, Value value);
  const Value* find(const Value& key) const;
  const Value* find(std::string_view key) const;
  const std::vector<std::pair<Value, Value>>& items() const { return items_; }
  int depth() const { return depth_; }

 private:
  std::vector<std::pair<Value, Value>> items_;
  std::unordered_map<std::string, size_t> index_;
  int depth_ = 1;
};

// namespace(): the one thing that templates change. The renderer owns them all and empties them at
// its end, since they may hold each other.
struct Namespace {
  std::vector<std::pair<std::string, Value>> items;
  Value* find(std::string_view name);
};

// The variable `loop`.
struct Loop {
  std::shared_ptr<const List> items;
  size_t index = 0;
};

struct MacroStatement;
struct Scope;

// A macro, a method bound to its value, or a global function.
struct Callable {
  std::string name;
  Value self;  // of a method
  bool method = false;
  const MacroStatement* macro = nullptr;  // of a macro
  Scope* scope = nullptr;                 // where the macro was defined
};

}  // namespace sortie::text::jinja
