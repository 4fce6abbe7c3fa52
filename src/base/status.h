#pragma once

#include <optional>
#include <string>
#include <utility>

#include "base/check.h"

namespace sortie {

// Why something ended without the result that was asked for.
enum class StatusCode {
  kOk,
  kUsage,      // a flag or argument is wrong: exit code 2, HTTP 400
  kInvalid,    // a file, checkpoint or request is malformed or refused
  kExhausted,  // memory, disk, pages or another resource ran out
  kRankLost,   // a peer died or missed its deadline
  kCancelled,  // the caller or a signal asked to stop
  kInternal,   // none of the above
};

// A user-facing error: one sentence that says what, where, and what to do. Broken invariants are
// not errors of this kind; they are CHECKs.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  static Status ok() { return {}; }
  static Status usage(std::string m) { return {StatusCode::kUsage, std::move(m)}; }
  static Status invalid(std::string m) { return {StatusCode::kInvalid, std::move(m)}; }
  static Status exhausted(std::string m) { return {StatusCode::kExhausted, std::move(m)}; }
  static Status rank_lost(std::string m) { return {StatusCode::kRankLost, std::move(m)}; }
  static Status cancelled(std::string m) { return {StatusCode::kCancelled, std::move(m)}; }
  static Status internal(std::string m) { return {StatusCode::kInternal, std::move(m)}; }

  bool is_ok() const { return code_ == StatusCode::kOk; }
  explicit operator bool() const { return is_ok(); }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }
  // The process's exit code for this status: 0, 2 for usage, 1 for everything else.
  int exit_code() const { return is_ok() ? 0 : code_ == StatusCode::kUsage ? 2 : 1; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

// A value, or the Status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}         // NOLINT(google-explicit-constructor)
  Result(Status status) : status_(std::move(status)) {  // NOLINT(google-explicit-constructor)
    CHECK(!status_.is_ok(), "a Result without a value needs an error");
  }

  bool is_ok() const { return status_.is_ok(); }
  explicit operator bool() const { return is_ok(); }
  const Status& status() const { return status_; }
  T& value() {
    CHECK(is_ok(), status_.message());
    return *value_;
  }
  const T& value() const {
    CHECK(is_ok(), status_.message());
    return *value_;
  }
  T& operator*() { return value(); }
  const T& operator*() const { return value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace sortie

#define SORTIE_CONCAT_(a, b) a##b
#define SORTIE_CONCAT(a, b) SORTIE_CONCAT_(a, b)

// Returns from the enclosing function with the error, if `expr` is one.
#define RETURN_IF_ERROR(expr)                                                \
  do {                                                                       \
    if (::sortie::Status status_ = (expr); !status_.is_ok()) return status_; \
  } while (0)

// ASSIGN_OR_RETURN(auto x, f()): x = value of f(), or return its error.
#define ASSIGN_OR_RETURN(lhs, expr)                                                                \
  auto SORTIE_CONCAT(result_, __LINE__) = (expr);                                                  \
  if (!SORTIE_CONCAT(result_, __LINE__).is_ok()) return SORTIE_CONCAT(result_, __LINE__).status(); \
  lhs = std::move(SORTIE_CONCAT(result_, __LINE__).value())
