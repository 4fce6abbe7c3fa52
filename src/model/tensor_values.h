#pragma once

#include <cmath>
#include <cstdint>

#include "base/scalar.h"
#include "base/tensor.h"

// Values of checkpoint tensors, which may be unaligned and of several types.
namespace sortie::model {

constexpr DType kReadFloats[] = {DType::kBf16, DType::kF32, DType::kF16};

// Element i as fp32; exact for all types here.
inline float value_at(const Tensor& t, int64_t i) {
  switch (t.dtype) {
    case DType::kF32:
      return load_unaligned<float>(t.data + i * 4);
    case DType::kBf16:
      return to_float(load_unaligned<bf16>(t.data + i * 2));
    case DType::kF16:
      return to_float(load_unaligned<fp16>(t.data + i * 2));
    case DType::kI8:
      return static_cast<float>(static_cast<int8_t>(t.data[i]));
    case DType::kE8m0:  // a biased exponent, 255 is NaN (OCP MX)
      return t.data[i] == std::byte{255} ? std::nanf("")
                                         : std::ldexp(1.0f, static_cast<int>(t.data[i]) - 127);
    default:
      return std::nanf("");
  }
}

// What is used in place is read now: loading then means loaded, and a broken file shows here.
inline void touch(const Tensor& t) {
  constexpr int64_t kPage = 4096;
  const volatile std::byte* data = t.data;
  for (int64_t i = 0; i < t.bytes(); i += kPage) (void)data[i];
}

}  // namespace sortie::model
