#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "backends/cpu/test_support.h"
#include "backends/cuda/cuda.h"
#include "backends/reference/reference.h"

// Tests that need a GPU: operands on both sides, the reference on the host's.
namespace sortie::cuda {

using cpu::Random;

inline bf16 poison() { return {0xffff}; }  // a NaN

// Values as a GPU holds them, still as floats: the reference then gets the very same.
inline std::vector<float> bf16_normals(Random& random, int64_t n, float scale = 1) {
  std::vector<float> v = random.normals(n, scale);
  for (float& x : v) x = round_to_bf16(x);
  return v;
}

class OnGpu : public testing::Test {
 protected:
  void SetUp() override {
    const Status s = available();
    if (!s.is_ok()) GTEST_SKIP() << "needs a Hopper GPU, not run: " << s.message();
    stream_ = device().stream();
    context_ = std::make_unique<ops::Context>(ops::Context{host.pool, arena_, stream_});
  }
  // Skipped tests have no fixture to speak of.
  void TearDown() override {
    if (context_ == nullptr) return;
    EXPECT_EQ(finish().message(), "");
  }

  static const ops::Device& device() { return *backend().device; }
  static const ops::BackendOf<bf16>& op() { return backend(); }
  const ops::Context& context() { return *context_; }
  Status finish() { return device().finish(stream_); }
  void clear() { arena_.reset(); }

  std::byte* up_bytes(const void* from, size_t bytes) {
    std::byte* to = arena_.alloc_bytes(bytes);
    device().upload(to, from, bytes, stream_);
    return to;
  }
  template <typename T>
  T* up(const std::vector<T>& v) {
    return reinterpret_cast<T*>(up_bytes(v.data(), v.size() * sizeof(T)));
  }
  bf16* up_bf16(const std::vector<float>& v, int64_t poisoned = 0) {
    std::vector<bf16> narrow;
    for (const float x : v) narrow.push_back(to_bf16(x));
    narrow.insert(narrow.end(), static_cast<size_t>(poisoned), poison());
    return up(narrow);
  }
  template <typename T>
  std::vector<T> down(const T* from, int64_t n) {
    std::vector<T> v(static_cast<size_t>(n));
    device().download(v.data(), from, v.size() * sizeof(T), stream_);
    EXPECT_EQ(finish().message(), "");
    return v;
  }
  std::vector<float> floats(const bf16* from, int64_t n) {
    std::vector<float> v;
    for (const bf16 x : down(from, n)) v.push_back(to_float(x));
    return v;
  }
  std::vector<float> floats(const float* from, int64_t n) { return down(from, n); }
  // Results that start as NaN, so that what is not written shows.
  template <typename T>
  T* fresh(int64_t n) {
    std::vector<T> nan(static_cast<size_t>(n));
    std::memset(static_cast<void*>(nan.data()), 0xff, nan.size() * sizeof(T));
    return up(nan);
  }

  ops::Matrix up_matrix(const ops::Matrix& m) {
    ops::Matrix d = m;
    const int64_t code_bytes = quant::code_bytes(m.format, m.n, m.k);
    const int64_t scale_bytes = quant::scale_bytes(m.format, m.n, m.k);
    d.codes = up_bytes(m.codes, static_cast<size_t>(code_bytes));
    d.scales = scale_bytes == 0 ? nullptr : up_bytes(m.scales, static_cast<size_t>(scale_bytes));
    return d;
  }
  // Rows and as many poisoned ones behind them.
  ops::Rows up_rows(const ops::Rows& rows, int64_t poisoned = 2) {
    ops::Rows d = rows;
    std::vector<std::byte> bytes(static_cast<size_t>((rows.count + poisoned) * rows.row_bytes()),
                                 std::byte{0xff});
    if (rows.count > 0) {
      std::memcpy(bytes.data(), rows.data, static_cast<size_t>(rows.count * rows.row_bytes()));
    }
    d.data = up(bytes);
    return d;
  }

  cpu::Machine host{1};

 private:
  Arena arena_{&cuda::backend().device->memory};
  void* stream_ = nullptr;
  std::unique_ptr<ops::Context> context_;
};

// The activations that a GPU feeds a matrix.
inline ops::Rows row_form(const ops::Matrix& m, int64_t count) {
  return {
      .format = ops::act_format<bf16>(m), .count = count, .k = m.k, .static_scale = m.input_scale};
}

}  // namespace sortie::cuda
