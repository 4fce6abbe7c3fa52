#include "text/jinja/value.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace sortie::text::jinja {
namespace {

std::string text_key(std::string_view text) {
  std::string key(1, 's');
  return key += text;
}

// Equal keys have equal texts: 1, 1.0 and True are one key, as in Python.
std::string key_text(const Value& key) {
  if (const std::string* s = key.string()) return text_key(*s);
  if (key.is_none()) return "none";
  int64_t i = 0;
  if (key.whole(i)) return fmt::format("n{}", i);
  if (const double* d = key.get_if<double>()) {
    const bool whole = std::floor(*d) == *d && std::abs(*d) < 9e15;
    return whole ? fmt::format("n{}", static_cast<int64_t>(*d)) : fmt::format("f{}", *d);
  }
  if (const List* list = key.as_list(); list != nullptr && list->tuple) {
    std::string text = "t";
    for (const Value& item : list->items) {
      const std::string part = key_text(item);
      text += fmt::format("{}:{}", part.size(), part);
      if (text.size() > 4096) fail("a tuple is too long to be a key");
    }
    return text;
  }
  fail(fmt::format("unhashable type: '{}'", key.type_name()));
}

int nested(int depth) {
  if (depth + 1 > kMaxValueDepth) fail(fmt::format("values nest deeper than {}", kMaxValueDepth));
  return depth + 1;
}

}  // namespace

void fail(std::string message, int line) { throw TemplateError{std::move(message), line}; }

void Budget::charge(size_t units) {
  steps -= static_cast<int64_t>(std::min<size_t>(units, size_t{1} << 40));
  if (steps < 0) fail("the template takes too many steps");
}

void Budget::check_bytes(size_t bytes) const {
  if (bytes > max_bytes) fail(fmt::format("a text grows past {} bytes", max_bytes));
}

Value Value::undefined(std::string what) {
  Value value;
  value.v_ = Undefined{std::make_shared<const std::string>(std::move(what))};
  return value;
}

Value Value::list(std::vector<Value> items, bool tuple) {
  int depth = 0;
  for (const Value& item : items) depth = std::max(depth, item.depth());
  return std::make_shared<const List>(List{std::move(items), tuple, nested(depth)});
}

Value Value::from_json(const nlohmann::ordered_json& json, int depth) {
  if (depth > kMaxValueDepth) fail(fmt::format("values nest deeper than {}", kMaxValueDepth));
  switch (json.type()) {
    case nlohmann::json::value_t::boolean:
      return json.get<bool>();
    case nlohmann::json::value_t::number_integer:
      return json.get<int64_t>();
    case nlohmann::json::value_t::number_unsigned: {
      const auto u = json.get<uint64_t>();
      if (u > static_cast<uint64_t>(INT64_MAX)) return static_cast<double>(u);
      return static_cast<int64_t>(u);
    }
    case nlohmann::json::value_t::number_float:
      return json.get<double>();
    case nlohmann::json::value_t::string:
      return json.get<std::string>();
    case nlohmann::json::value_t::array: {
      std::vector<Value> items;
      items.reserve(json.size());
      for (const auto& item : json) items.push_back(from_json(item, depth + 1));
      return list(std::move(items));
    }
    case nlohmann::json::value_t::object: {
      auto dict = std::make_shared<Dict>();
      for (const auto& [key, item] : json.items()) dict->set(key, from_json(item, depth + 1));
      return std::shared_ptr<const Dict>(std::move(dict));
    }
    default:
      return {};
  }
}

bool Value::whole(int64_t& out) const {
  if (const bool* b = get_if<bool>()) {
    out = *b ? 1 : 0;
    return true;
  }
  if (const int64_t* i = get_if<int64_t>()) {
    out = *i;
    return true;
  }
  return false;
}

double Value::number() const {
  int64_t i = 0;
  if (whole(i)) return static_cast<double>(i);
  const double* d = get_if<double>();
  return d == nullptr ? 0 : *d;
}

bool Value::truthy() const {
  if (is_undefined() || is_none()) return false;
  if (is_number()) return number() != 0;
  if (const std::string* s = string()) return !s->empty();
  if (const List* l = as_list()) return !l->items.empty();
  if (const Dict* d = as_dict()) return !d->items().empty();
  return true;
}

std::string Value::type_name() const {
  if (is_undefined()) return "Undefined";
  if (is_none()) return "NoneType";
  if (is_bool()) return "bool";
  if (is_int()) return "int";
  if (is_float()) return "float";
  if (is_string()) return "str";
  if (const List* l = as_list()) return l->tuple ? "tuple" : "list";
  if (as_dict() != nullptr) return "dict";
  if (as_namespace() != nullptr) return "Namespace";
  if (as_loop() != nullptr) return "LoopContext";
  return "function";
}

int Value::depth() const {
  if (const List* l = as_list()) return l->depth;
  if (const Dict* d = as_dict()) return d->depth();
  if (const Loop* l = as_loop()) return l->items->depth + 1;
  if (const Callable* c = as_callable()) return c->self.depth() + 1;
  return 0;
}

void Dict::set(Value key, Value value) {
  depth_ = std::max(depth_, nested(std::max(key.depth(), value.depth())));
  const auto [it, fresh] = index_.try_emplace(key_text(key), items_.size());
  if (fresh) {
    items_.emplace_back(std::move(key), std::move(value));
  } else {
    items_[it->second].second = std::move(value);
  }
}

const Value* Dict::find(const Value& key) const {
  const auto it = index_.find(key_text(key));
  return it == index_.end() ? nullptr : &items_[it->second].second;
}

const Value* Dict::find(std::string_view key) const {
  const auto it = index_.find(text_key(key));
  return it == index_.end() ? nullptr : &items_[it->second].second;
}

Value* Namespace::find(std::string_view name) {
  for (auto& [key, value] : items) {
    if (key == name) return &value;
  }
  return nullptr;
}

}  // namespace sortie::text::jinja
