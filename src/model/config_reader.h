#pragma once

#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "base/status.h"

namespace sortie::model {

// Reads keys of one JSON object with bounds and keeps the first error, so that a caller reads
// everything and looks once. A null counts as absent, as in Hugging Face's configs.
class ConfigReader {
 public:
  ConfigReader(const nlohmann::json& object, std::string where)
      : object_(object), where_(std::move(where)) {}

  const Status& status() const { return status_; }
  void fail(std::string message) {
    if (status_.is_ok()) status_ = Status::invalid(std::move(message));
  }

  // The value under `key`, or null if it is absent or JSON null.
  const nlohmann::json* find(const std::string& key) const {
    const auto it = object_.find(key);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }
  bool has(const std::string& key) const { return find(key) != nullptr; }

  // An integer in [low, high]; files also write it as 3.0.
  int64_t integer(const std::string& key, std::optional<int64_t> absent, int64_t low,
                  int64_t high) {
    const double v =
        real(key, absent ? std::optional<double>(static_cast<double>(*absent)) : std::nullopt,
             static_cast<double>(low), static_cast<double>(high));
    if (v != std::floor(v)) {
      fail(fmt::format("{}: \"{}\" = {} is not an integer.", where_, key, v));
      return low;
    }
    return static_cast<int64_t>(v);
  }

  double real(const std::string& key, std::optional<double> absent, double low, double high) {
    const nlohmann::json* v = find(key);
    if (v == nullptr) {
      if (!absent) fail(fmt::format("{} lacks \"{}\".", where_, key));
      return absent.value_or(low);
    }
    if (!v->is_number()) {
      fail(fmt::format("{}: \"{}\" is not a number.", where_, key));
      return low;
    }
    const double d = v->get<double>();
    if (!(d >= low && d <= high)) {
      fail(fmt::format("{}: \"{}\" = {} lies outside {} to {}.", where_, key, d, low, high));
      return low;
    }
    return d;
  }

  bool boolean(const std::string& key, bool absent) {
    const nlohmann::json* v = find(key);
    if (v == nullptr) return absent;
    if (!v->is_boolean()) {
      fail(fmt::format("{}: \"{}\" is neither true nor false.", where_, key));
      return absent;
    }
    return v->get<bool>();
  }

  std::string string(const std::string& key, const std::string& absent) {
    const nlohmann::json* v = find(key);
    if (v == nullptr) return absent;
    if (!v->is_string()) {
      fail(fmt::format("{}: \"{}\" is not a string.", where_, key));
      return absent;
    }
    return v->get<std::string>();
  }

 private:
  const nlohmann::json& object_;
  const std::string where_;
  Status status_;
};

}  // namespace sortie::model
