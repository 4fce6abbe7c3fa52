#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "model/config.h"

// Three texts with a NUL between them: config.json, hf_quant_config.json, generation_config.json.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string_view rest(reinterpret_cast<const char*>(data), size);
  const auto next = [&] {
    const std::string_view text = rest.substr(0, rest.find('\0'));
    rest.remove_prefix(text.size() < rest.size() ? text.size() + 1 : rest.size());
    return text;
  };
  const std::string_view config = next();
  const std::string_view quant = next();
  const auto c = sortie::model::parse_config(config, quant, next());
  if (c.is_ok()) {
    CHECK(c->hidden_size > 0 && c->qk_rope_head_dim % 2 == 0);
    CHECK(c->n_routed_experts % c->n_group == 0);
    CHECK(c->softmax_scale() > 0);
    if (c->qk_rope_head_dim <= 128) CHECK(!c->cos_sin_table(3).empty());
  } else {
    CHECK(!c.status().message().empty());
  }
  return 0;
}
