// Fuzzes the reader of tokenizer.json (with tokenizer_config.json behind a zero byte) and, where a
// tokenizer comes of it, encoding; and encoding with a fixed tokenizer, which must round-trip.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "base/json.h"
#include "text/byte_level.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

namespace {

using sortie::text::Tokenizer;

std::shared_ptr<const Tokenizer> fixed_tokenizer() {
  nlohmann::json vocab = nlohmann::json::object();
  int id = 0;
  for (int b = 0; b < 256; ++b) {
    vocab[sortie::text::byte_symbol(static_cast<uint8_t>(b))] = id++;
  }
  for (const char* token : {"ab", "abc", "aa", "aaaa"}) vocab[token] = id++;
  const nlohmann::json byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}};
  const nlohmann::json digits = {{"type", "Digits"}, {"individual_digits", true}};
  const nlohmann::json added = {{"id", id}, {"content", "<|x|>"}, {"special", true}};
  const nlohmann::json file = {
      {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", {"a b", "ab c", "a a", "aa aa"}}}},
      {"pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", {digits, byte_level}}}},
      {"added_tokens", nlohmann::json::array({added})}};
  auto result = Tokenizer::parse(file.dump(), "");
  if (!result.is_ok()) abort();
  return result.value();
}

void check_round_trip(const Tokenizer& tokenizer, std::string_view text) {
  const auto ids = tokenizer.encode(text, false);
  if (!ids.is_ok()) abort();
  if (tokenizer.decode(*ids, false) != sortie::text::valid_utf8(text)) abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::shared_ptr<const Tokenizer> kFixed = fixed_tokenizer();
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  check_round_trip(*kFixed, input);
  const size_t zero = input.find('\0');
  const std::string_view file = input.substr(0, zero);
  const std::string_view config =
      zero == std::string_view::npos ? std::string_view() : input.substr(zero + 1);
  const auto tokenizer = Tokenizer::parse(file, config);
  if (!tokenizer.is_ok()) return 0;
  const auto ids = (*tokenizer)->encode(input.substr(0, 256), true);
  if (ids.is_ok() && !sortie::text::is_valid_utf8((*tokenizer)->decode(*ids, true))) abort();
  return 0;
}
