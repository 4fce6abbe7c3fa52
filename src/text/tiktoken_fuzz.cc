// Fuzzes the reader of tiktoken.model, behind a table of all bytes so that vocabularies come of it,
// and merging with what came of it, which must keep the bytes.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "text/tiktoken.h"

namespace {

constexpr std::string_view kAlphabet =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

std::string all_bytes() {
  std::string file;
  for (size_t b = 0; b < 256; ++b) {
    file += {kAlphabet[b >> 2], kAlphabet[(b & 3) << 4], '=', '=', ' '};
    file += std::to_string(b) + "\n";
  }
  return file;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sortie::text;
  static const std::string kBytes = all_bytes();
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  (void)parse_tiktoken(input);
  const auto vocabulary = parse_tiktoken(kBytes + std::string(input));
  if (!vocabulary.is_ok()) return 0;
  const Bpe bpe(vocabulary->byte_ids, vocabulary->merges());
  Bpe::Scratch scratch;
  std::vector<int32_t> ids;
  bpe.encode(input, scratch, ids);
  std::string bytes;
  for (const int32_t id : ids) bytes += vocabulary->tokens[static_cast<size_t>(id)];
  if (bytes != input) abort();
  return 0;
}
