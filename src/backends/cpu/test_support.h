#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "backends/cpu/isa.h"
#include "backends/reference/reference.h"
#include "quant/activations.h"
#include "quant/matrix_ops.h"

// Random operands, and the two ways in which results are compared: within a tolerance against the
// reference, and bit for bit among the forms of one instruction set.
namespace sortie::cpu {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A test over Isa: one that this processor lacks is skipped, and the suite's output says why.
class IsaTest : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    const std::string missing = isa_missing(GetParam());
    if (!missing.empty()) GTEST_SKIP() << isa_name(GetParam()) << ": " << missing;
  }
  const ops::Backend& op() { return backend(GetParam()); }
};
inline std::string isa_parameter(const testing::TestParamInfo<Isa>& info) {
  return std::string(isa_name(info.param));
}

// A pool and scratch memory for one call after another.
struct Machine {
  explicit Machine(int threads) : pool(threads) {}
  ThreadPool pool;
  Arena arena;
  ops::Context context{pool, arena};
};

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  float normal() { return normal_(engine_); }
  int64_t below(int64_t n) { return std::uniform_int_distribution<int64_t>(0, n - 1)(engine_); }
  std::vector<float> normals(int64_t n, float scale = 1) {
    std::vector<float> v(static_cast<size_t>(n));
    for (float& x : v) x = normal() * scale;
    return v;
  }

 private:
  std::mt19937 engine_;
  std::normal_distribution<float> normal_;
};

// Zero bytes from a 64-byte boundary on.
class Bytes {
 public:
  explicit Bytes(int64_t n) : memory_(static_cast<size_t>(n) + 64) {}
  std::byte* data() {
    const auto at = reinterpret_cast<uintptr_t>(memory_.data());
    return memory_.data() + (64 - at % 64) % 64;
  }

 private:
  std::vector<std::byte> memory_;
};

struct Weights {
  Weights(quant::Format format, int64_t n, int64_t k, Random& random)
      : codes(n * k * 4), scales(n * k * 4 + 64) {
    matrix = {.format = format, .n = n, .k = k, .codes = codes.data(), .scales = scales.data()};
    const std::vector<float> w = random.normals(n * k, 1 / std::sqrt(static_cast<float>(k)));
    const auto bytes = static_cast<size_t>(n * k);
    if (format == quant::Format::kF32) {
      std::memcpy(codes.data(), w.data(), bytes * 4);
    } else if (format == quant::Format::kBf16) {
      for (size_t i = 0; i < bytes; ++i) reinterpret_cast<bf16*>(codes.data())[i] = to_bf16(w[i]);
    } else {
      const quant::Matrix source{.format = quant::Format::kF32,
                                 .n = n,
                                 .k = k,
                                 .codes = reinterpret_cast<const std::byte*>(w.data())};
      quant::quantise_rows(source, 0, n, format, codes.data(), scales.data());
    }
  }
  // Static activations; int8 sums then have a bias too, as msModelSlim's.
  void make_static(float scale) {
    matrix.input_scale = scale;
    if (matrix.format != quant::Format::kW8A8Int8 || scale == 0) return;
    for (int64_t i = 0; i < matrix.n; ++i) {
      sum_bias.push_back(static_cast<int32_t>(i * 7919 % 40001 - 20000));
    }
    matrix.sum_bias = sum_bias.data();
  }

  Bytes codes;
  Bytes scales;
  std::vector<int32_t> sum_bias;
  quant::Matrix matrix;
};

// Rows in a format; those past `valid` are poison.
struct Activations {
  Activations(quant::ActFormat format, int64_t valid, int64_t poison, int64_t k, Random& random,
              float static_scale = 0)
      : memory((valid + poison + 1) * quant::act_row_bytes(format, k)) {
    rows = {.format = format,
            .count = valid,
            .k = k,
            .data = memory.data(),
            .static_scale = static_scale};
    std::memset(memory.data(), 0xff, static_cast<size_t>((valid + poison) * rows.row_bytes()));
    for (int64_t i = 0; i < valid; ++i) {
      const std::vector<float> x = random.normals(k);
      quant::quantise_row(x.data(), rows, i);
    }
  }
  Bytes memory;
  quant::Rows rows;
};

// |a - b| / |b| over all elements.
inline double relative_error(const std::vector<float>& a, const std::vector<float>& b) {
  EXPECT_EQ(a.size(), b.size());
  double difference = 0;
  double norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    norm += double{b[i]} * b[i];
  }
  return norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
}

template <typename T>
bool same_bits(const T* a, const T* b, int64_t n) {
  return n == 0 || std::memcmp(a, b, static_cast<size_t>(n) * sizeof(T)) == 0;
}
template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && same_bits(a.data(), b.data(), static_cast<int64_t>(a.size()));
}

}  // namespace sortie::cpu
