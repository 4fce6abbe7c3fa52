#include "model/safetensors_header.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "base/json.h"

namespace sortie::model {
namespace {

struct TypeInfo {
  std::string_view name;
  DType dtype;
  int64_t bytes;
};
// Types without a DType of their own may stand in a file (they are checked) but are never used.
constexpr TypeInfo kTypes[] = {
    {"F64", DType::kF64, 8},   {"F32", DType::kF32, 4},      {"F16", DType::kF16, 2},
    {"BF16", DType::kBf16, 2}, {"F8_E4M3", DType::kE4m3, 1}, {"F8_E8M0", DType::kE8m0, 1},
    {"I8", DType::kI8, 1},     {"U8", DType::kU8, 1},        {"I32", DType::kI32, 4},
    {"I64", DType::kI64, 8},   {"BOOL", DType::kBool, 1},    {"F8_E5M2", DType::kOther, 1},
    {"I16", DType::kOther, 2}, {"U16", DType::kOther, 2},    {"U32", DType::kOther, 4},
    {"U64", DType::kOther, 8},
};

// Events of nlohmann's SAX parser, turned to entries. A DOM of a 100 MB header would take gigabytes
// and hide duplicate names.
class Handler : public nlohmann::json_sax<nlohmann::json> {
 public:
  std::vector<HeaderEntry> take() { return std::move(entries_); }
  const std::string& error() const { return error_; }

  bool start_object(size_t) override {
    ++depth_;
    if (depth_ == 1) return true;
    if (metadata_) return true;
    if (depth_ == 2) {
      entry_ = HeaderEntry{};
      entry_.name = key_;
      seen_ = 0;
      return true;
    }
    return fail(fmt::format("tensor {} holds a nested object", printable(entry_.name)));
  }
  bool end_object() override {
    --depth_;
    if (depth_ == 1) {
      if (!metadata_ && seen_ != (kDtype | kShape | kOffsets)) {
        return fail(
            fmt::format("tensor {} lacks dtype, shape or data_offsets", printable(entry_.name)));
      }
      if (!metadata_) return finish_entry();
      metadata_ = false;
    }
    return true;
  }
  bool key(std::string& name) override {
    if (metadata_) return true;
    if (depth_ == 1) {
      if (!names_.insert(name).second) {
        return fail(fmt::format("tensor {} stands there twice", printable(name)));
      }
      metadata_ = name == "__metadata__";
      key_ = name;
      return true;
    }
    const int field = name == "dtype"          ? kDtype
                      : name == "shape"        ? kShape
                      : name == "data_offsets" ? kOffsets
                                               : 0;
    if (field == 0) {
      return fail(
          fmt::format("tensor {} has an unknown key {}", printable(entry_.name), printable(name)));
    }
    if ((seen_ & field) != 0) {
      return fail(fmt::format("tensor {} has its {} twice", printable(entry_.name), name));
    }
    seen_ |= field;
    field_ = field;
    return true;
  }
  bool start_array(size_t) override {
    ++depth_;
    if (metadata_ && depth_ > 2) return true;
    if (depth_ != 3 || (field_ != kShape && field_ != kOffsets)) return unexpected();
    numbers_.clear();
    return true;
  }
  bool end_array() override {
    --depth_;
    if (metadata_) return true;
    if (field_ == kShape) {
      if (numbers_.size() > entry_.shape.size()) {
        return fail(fmt::format("tensor {} has {} dimensions; at most {} are supported",
                                printable(entry_.name), numbers_.size(), entry_.shape.size()));
      }
      entry_.rank = static_cast<int>(numbers_.size());
      std::copy(numbers_.begin(), numbers_.end(), entry_.shape.begin());
    } else {
      if (numbers_.size() != 2) {
        return fail(fmt::format("tensor {} has data_offsets other than [begin, end]",
                                printable(entry_.name)));
      }
      entry_.begin = numbers_[0];
      entry_.end = numbers_[1];
    }
    return true;
  }
  bool string(std::string& value) override {
    if (metadata_ && depth_ >= 2) return true;
    if (metadata_ || depth_ != 2 || field_ != kDtype) return unexpected();
    type_ = value;
    return true;
  }
  bool number_unsigned(uint64_t value) override {
    if (metadata_ && depth_ >= 2) return true;
    if (metadata_ || depth_ != 3) return unexpected();
    if (value > static_cast<uint64_t>(INT64_MAX)) {
      return fail(fmt::format("tensor {} has the absurd number {}", printable(entry_.name), value));
    }
    if (numbers_.size() < 64) numbers_.push_back(static_cast<int64_t>(value));
    return true;
  }
  bool null() override { return metadata_ && depth_ >= 2 ? true : unexpected(); }
  bool boolean(bool) override { return metadata_ && depth_ >= 2 ? true : unexpected(); }
  bool number_integer(int64_t) override { return metadata_ && depth_ >= 2 ? true : unexpected(); }
  bool number_float(double, const std::string&) override {
    return metadata_ && depth_ >= 2 ? true : unexpected();
  }
  bool binary(nlohmann::json::binary_t&) override { return unexpected(); }
  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) override {
    return fail(fmt::format("the header is not valid JSON near its byte {}", position));
  }

 private:
  enum Field { kDtype = 1, kShape = 2, kOffsets = 4 };

  bool fail(std::string message) {
    if (error_.empty()) error_ = std::move(message);
    return false;
  }
  bool unexpected() {
    if (names_.empty()) return fail("the header is not a JSON object");
    return fail(fmt::format("tensor {} has a value of the wrong kind", printable(key_)));
  }
  bool finish_entry() {
    int64_t bytes = 1;
    const auto* type = std::find_if(std::begin(kTypes), std::end(kTypes),
                                    [&](const TypeInfo& t) { return t.name == type_; });
    const bool known = type != std::end(kTypes);
    entry_.dtype = known ? type->dtype : DType::kOther;
    if (known) bytes = type->bytes;
    bool overflow = false;
    for (int i = 0; i < entry_.rank; ++i) {
      overflow |= __builtin_mul_overflow(bytes, entry_.shape[static_cast<size_t>(i)], &bytes);
    }
    if (overflow) {
      return fail(fmt::format("the shape of tensor {} overflows", printable(entry_.name)));
    }
    if (entry_.begin > entry_.end) {
      return fail(fmt::format("tensor {} ends before it begins", printable(entry_.name)));
    }
    if (known && entry_.end - entry_.begin != bytes) {
      return fail(fmt::format("tensor {} has {} bytes but its shape and dtype {} need {}",
                              printable(entry_.name), entry_.end - entry_.begin, type_, bytes));
    }
    entries_.push_back(std::move(entry_));
    return true;
  }

  std::vector<HeaderEntry> entries_;
  std::set<std::string> names_;
  std::string error_;
  std::string key_;
  std::string type_;
  HeaderEntry entry_;
  std::vector<int64_t> numbers_;
  int depth_ = 0;
  int seen_ = 0;
  int field_ = 0;
  bool metadata_ = false;
};

Status check_coverage(std::vector<HeaderEntry>& entries, int64_t data_bytes) {
  std::stable_sort(entries.begin(), entries.end(), [](const HeaderEntry& a, const HeaderEntry& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  });
  int64_t at = 0;
  for (const HeaderEntry& e : entries) {
    if (e.end > data_bytes) {
      return Status::invalid(
          fmt::format("tensor {} reaches to byte {} of a data section of {} bytes: the file is "
                      "truncated or its header lies",
                      printable(e.name), e.end, data_bytes));
    }
    if (e.begin < at) {
      return Status::invalid(
          fmt::format("tensor {} overlaps the one before it", printable(e.name)));
    }
    if (e.begin > at) {
      return Status::invalid(fmt::format("there is a hole of {} bytes before tensor {}",
                                         e.begin - at, printable(e.name)));
    }
    at = e.end;
  }
  if (at != data_bytes) {
    return Status::invalid(
        fmt::format("{} bytes after the last tensor belong to no tensor", data_bytes - at));
  }
  return Status::ok();
}

}  // namespace

std::string printable(std::string_view name) {
  constexpr size_t kLongest = 120;
  std::string out;
  for (const char c : name.substr(0, kLongest)) {
    const auto u = static_cast<unsigned char>(c);
    out += u < 0x20 || u == 0x7f ? '?' : c;
  }
  if (name.size() > kLongest) {
    while (!out.empty() && (static_cast<unsigned char>(out.back()) & 0xc0u) == 0x80u)
      out.pop_back();
    if (!out.empty() && (static_cast<unsigned char>(out.back()) & 0x80u) != 0) out.pop_back();
    out += "...";
  }
  return out;
}

Result<std::vector<HeaderEntry>> parse_safetensors_header(std::string_view json,
                                                          int64_t data_bytes) {
  if (json_too_deep(json)) {
    return Status::invalid(fmt::format("its header nests deeper than {} levels", kMaxJsonDepth));
  }
  Handler handler;
  if (!nlohmann::json::sax_parse(json.begin(), json.end(), &handler)) {
    return Status::invalid(handler.error().empty() ? "the header is not valid JSON"
                                                   : handler.error());
  }
  std::vector<HeaderEntry> entries = handler.take();
  RETURN_IF_ERROR(check_coverage(entries, data_bytes));
  return entries;
}

}  // namespace sortie::model
