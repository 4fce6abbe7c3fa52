#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/check.h"
#include "model/config.h"

// Rotary frequencies and scales as Hugging Face's DeepSeek models compute them. YaRN: Peng et al.,
// "YaRN: Efficient Context Window Extension of Large Language Models", 2023.
namespace sortie::model {
namespace {

double yarn_mscale(double factor, double mscale) {
  return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

// The (fractional) pair index whose wavelength makes `rotations` turns over the original context.
double correction_dim(double rotations, double dim, double base, double original_max_position) {
  return dim * std::log(original_max_position / (rotations * 2 * std::numbers::pi)) /
         (2 * std::log(base));
}

// fp32 throughout, as HF has it: one radian's last bit, times a position of 100,000, is visible.
std::vector<float> inverse_frequencies(const Config& c) {
  const int64_t dim = c.qk_rope_head_dim;
  std::vector<float> inverse(static_cast<size_t>(dim / 2));
  const RopeScaling& r = c.rope_scaling;
  double low = 0;
  double high = 0;
  if (r.factor > 0) {
    const auto d = static_cast<double>(dim);
    const auto original = static_cast<double>(r.original_max_position);
    low = std::floor(correction_dim(r.beta_fast, d, c.rope_theta, original));
    high = std::ceil(correction_dim(r.beta_slow, d, c.rope_theta, original));
    low = std::max(low, 0.0);
    high = std::min(high, d - 1);
    if (low == high) high += 0.001;  // no division by zero
  }
  for (int64_t i = 0; i < dim / 2; ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(dim);
    const auto power = static_cast<float>(std::pow(c.rope_theta, static_cast<double>(exponent)));
    float f = 1.0f / power;
    if (r.factor > 0) {
      const float interpolated = 1.0f / (static_cast<float>(r.factor) * power);
      const float ramp = std::clamp(
          (static_cast<float>(i) - static_cast<float>(low)) / static_cast<float>(high - low), 0.0f,
          1.0f);
      const float extrapolated_share = 1.0f - ramp;
      f = interpolated * (1.0f - extrapolated_share) + f * extrapolated_share;
    }
    inverse[static_cast<size_t>(i)] = f;
  }
  return inverse;
}

}  // namespace

double Config::softmax_scale() const {
  const double scale = 1.0 / std::sqrt(static_cast<double>(qk_head_dim()));
  if (rope_scaling.factor <= 0 || rope_scaling.mscale_all_dim == 0) return scale;
  const double m = yarn_mscale(rope_scaling.factor, rope_scaling.mscale_all_dim);
  return scale * m * m;
}

std::vector<float> Config::cos_sin_table(int64_t max_position) const {
  CHECK(max_position >= 0 && qk_rope_head_dim % 2 == 0);
  const std::vector<float> inverse = inverse_frequencies(*this);
  double ratio = 1;
  if (rope_scaling.factor > 0) {
    ratio = yarn_mscale(rope_scaling.factor, rope_scaling.mscale) /
            yarn_mscale(rope_scaling.factor, rope_scaling.mscale_all_dim);
  }
  std::vector<float> table(static_cast<size_t>(max_position) * inverse.size() * 2);
  size_t at = 0;
  for (int64_t p = 0; p < max_position; ++p) {
    for (const float f : inverse) {
      const auto angle = static_cast<double>(f * static_cast<float>(p));
      table[at++] = static_cast<float>(std::cos(angle) * ratio);
      table[at++] = static_cast<float>(std::sin(angle) * ratio);
    }
  }
  return table;
}

}  // namespace sortie::model
