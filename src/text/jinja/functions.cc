#include <fmt/format.h>

#include <array>
#include <ctime>

#include "text/jinja/interpreter.h"
#include "text/jinja/python.h"
#include "text/jinja/strings.h"

// The global functions: jinja2's and the two that Hugging Face adds.
namespace sortie::text::jinja {
namespace {

constexpr int64_t kMaxRange = 100'000;  // as jinja2's sandbox

Value range(Interpreter& in, const Arguments& a) {
  const bool one = a.positional.size() == 1;
  const int64_t begin = one ? 0 : a.whole(0, "start", 0);
  const int64_t end = one ? a.whole(0, "stop", 0) : a.whole(1, "stop", 0);
  const int64_t step = a.whole(2, "step", 1);
  if (a.positional.empty()) fail("range() needs an end");
  if (step == 0) fail("range() step must not be zero");
  // In 128 bits: the ends may be any two integers.
  const __int128 span =
      step > 0 ? static_cast<__int128>(end) - begin : static_cast<__int128>(begin) - end;
  const __int128 size = step > 0 ? static_cast<__int128>(step) : -static_cast<__int128>(step);
  const __int128 count = span <= 0 ? 0 : (span + size - 1) / size;
  if (count > kMaxRange) fail(fmt::format("range() is longer than {}", kMaxRange));
  in.budget().charge(static_cast<size_t>(count));
  std::vector<Value> items;
  items.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < static_cast<int64_t>(count); ++i) items.emplace_back(begin + i * step);
  return Value::list(std::move(items));
}

// dict(mapping, name=value …), as pairs.
std::vector<std::pair<Value, Value>> pairs(Interpreter& in, const Arguments& a) {
  std::vector<std::pair<Value, Value>> result;
  if (!a.positional.empty()) {
    if (const Dict* dict = a.positional[0].as_dict()) {
      result = dict->items();
    } else {
      const auto all = iterate(a.positional[0], in.budget());
      for (const Value& item : all->items) {
        const auto pair = iterate(item, in.budget());
        if (pair->items.size() != 2) fail("dict() needs pairs");
        result.emplace_back(pair->items[0], pair->items[1]);
      }
    }
  }
  in.budget().charge(result.size());
  for (const auto& [name, value] : a.named) result.emplace_back(name, value);
  return result;
}

Value make_dict(Interpreter& in, const Arguments& a) {
  auto dict = std::make_shared<Dict>();
  for (auto& [key, value] : pairs(in, a)) {
    if (const std::string* s = key.string()) in.budget().charge_bytes(s->size());
    dict->set(key, value);
  }
  return std::shared_ptr<const Dict>(std::move(dict));
}

Value make_namespace(Interpreter& in, const Arguments& a) {
  std::vector<std::pair<std::string, Value>> items;
  for (auto& [key, value] : pairs(in, a)) {
    items.emplace_back(require_string(key, "an attribute's name"), value);
  }
  if (items.size() > 1000) fail("a namespace has too many attributes");
  return in.make_namespace(items);
}

Value raise_exception(Interpreter& in, const Arguments& a) {
  fail(to_text(a.get(0, "message", "the template raised an exception"), in.budget()));
}

Value strftime_now(Interpreter& in, const Arguments& a) {
  const std::string format = require_string(a.get(0, "format", {}), "strftime_now's format");
  const std::time_t now = in.now();
  std::tm local{};
  localtime_r(&now, &local);
  std::array<char, 1024> buffer{};
  const size_t n = std::strftime(buffer.data(), buffer.size(), format.c_str(), &local);
  return std::string(buffer.data(), n);
}

using Function = Value (*)(Interpreter&, const Arguments&);

const std::unordered_map<std::string_view, Function>& functions() {
  static const std::unordered_map<std::string_view, Function> kFunctions = {
      {"range", range},
      {"dict", make_dict},
      {"namespace", make_namespace},
      {"raise_exception", raise_exception},
      {"strftime_now", strftime_now},
  };
  return kFunctions;
}

}  // namespace

bool is_function(std::string_view name) { return functions().contains(name); }

Value call_function(Interpreter& in, std::string_view name, const Arguments& arguments) {
  return functions().at(name)(in, arguments);
}

}  // namespace sortie::text::jinja
