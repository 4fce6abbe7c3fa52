#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace sortie {

// Element types of checkpoint tensors.
enum class DType : uint8_t {
  kF32,
  kF16,
  kBf16,
  kE4m3,
  kE8m0,
  kI8,
  kU8,
  kI32,
  kI64,
  kBool,
  kF64,
  kOther
};

constexpr int64_t dtype_bytes(DType t) {
  switch (t) {
    case DType::kF64:
    case DType::kI64:
      return 8;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kF16:
    case DType::kBf16:
      return 2;
    default:
      return 1;
  }
}

constexpr std::string_view dtype_name(DType t) {
  switch (t) {
    case DType::kF64:
      return "F64";
    case DType::kI64:
      return "I64";
    case DType::kF32:
      return "F32";
    case DType::kI32:
      return "I32";
    case DType::kF16:
      return "F16";
    case DType::kBf16:
      return "BF16";
    case DType::kE4m3:
      return "F8_E4M3";
    case DType::kE8m0:
      return "F8_E8M0";
    case DType::kI8:
      return "I8";
    case DType::kU8:
      return "U8";
    case DType::kBool:
      return "BOOL";
    case DType::kOther:
      return "other";
  }
  return "other";
}

// A view of a dense row-major tensor. Owns nothing; `data` may be unaligned when it points into a
// mapped file.
struct Tensor {
  const std::byte* data = nullptr;
  DType dtype = DType::kF32;
  int rank = 0;
  std::array<int64_t, 4> shape{};

  int64_t elements() const {
    int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= shape[static_cast<size_t>(i)];
    return n;
  }
  int64_t bytes() const { return elements() * dtype_bytes(dtype); }
};

}  // namespace sortie
