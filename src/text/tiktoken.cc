#include "text/tiktoken.h"

#include <fmt/format.h>

#include <charconv>
#include <optional>
#include <unordered_map>

namespace sortie::text {
namespace {

constexpr size_t kMaxTokens = 1'000'000;
constexpr size_t kMaxTokenBytes = 1024;

// RFC 4648, padded, no line breaks; nothing else passes.
std::optional<std::string> from_base64(std::string_view text) {
  const auto value = [](char c) -> int {
    if (c >= 'A' && c <= 'Z') return c - 'A';
    if (c >= 'a' && c <= 'z') return c - 'a' + 26;
    if (c >= '0' && c <= '9') return c - '0' + 52;
    if (c == '+') return 62;
    return c == '/' ? 63 : -1;
  };
  if (text.empty() || text.size() % 4 != 0) return std::nullopt;
  size_t padding = 0;
  while (padding < 2 && text[text.size() - 1 - padding] == '=') ++padding;
  std::string bytes;
  uint32_t bits = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool padded = i >= text.size() - padding;
    const int v = padded ? 0 : value(text[i]);
    if (v < 0) return std::nullopt;
    bits = bits << 6 | static_cast<uint32_t>(v);
    if (i % 4 != 3) continue;
    for (const int shift : {16, 8, 0}) bytes += static_cast<char>(bits >> shift & 0xFF);
    bits = 0;
  }
  const bool clean = bytes.find_first_not_of('\0', bytes.size() - padding) == std::string::npos;
  if (padding > 0 && !clean) return std::nullopt;  // bits that belong to no byte
  bytes.resize(bytes.size() - padding);
  return bytes;
}

// One Unicode class without Han, as often as `times` says.
std::string without_han(const char* classes, const char* times) {
  return fmt::format(R"((?:(?!\p{{sc:Han}})[{}\p{{Lm}}\p{{Lo}}\p{{M}}]){})", classes, times);
}

std::string moonshot_pattern() {
  const char* before = R"([^\r\n\p{L}\p{N}]?)";
  const char* contraction = R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?)";
  const char* upper = R"(\p{Lu}\p{Lt})";
  const char* lower = R"(\p{Ll})";
  std::string pattern = R"(\p{sc:Han}+|)";
  pattern += before + without_han(upper, "*") + without_han(lower, "+") + contraction + "|";
  pattern += before + without_han(upper, "+") + without_han(lower, "*") + contraction + "|";
  pattern += R"(\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
  return pattern;
}

}  // namespace

const std::string kMoonshotPattern = moonshot_pattern();

Result<TiktokenVocabulary> parse_tiktoken(std::string_view file) {
  TiktokenVocabulary result;
  std::vector<std::string>& tokens = result.tokens;
  size_t line_number = 0;
  size_t found = 0;
  while (!file.empty()) {
    const size_t end = std::min(file.find('\n'), file.size());
    std::string_view line = file.substr(0, end);
    file.remove_prefix(std::min(end + 1, file.size()));
    ++line_number;
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    if (line.empty()) continue;
    const size_t space = std::min(line.find(' '), line.size());
    const std::string_view number = line.substr(std::min(space + 1, line.size()));
    const auto bytes = from_base64(line.substr(0, space));
    size_t rank = 0;
    const auto [stop, error] = std::from_chars(number.data(), number.data() + number.size(), rank);
    if (!bytes || bytes->size() > kMaxTokenBytes || error != std::errc() ||
        stop != number.data() + number.size() || rank >= kMaxTokens) {
      return Status::invalid(
          fmt::format("line {} is not the base64 of 1 to {} bytes, a space and a rank below {}",
                      line_number, kMaxTokenBytes, kMaxTokens));
    }
    if (rank >= tokens.size()) tokens.resize(rank + 1);
    if (!tokens[rank].empty()) {
      return Status::invalid(fmt::format("line {} has the rank {} again", line_number, rank));
    }
    tokens[rank] = *bytes;
    ++found;
  }
  if (found == 0) return Status::invalid("it has no tokens");
  if (found != tokens.size()) {
    return Status::invalid(
        fmt::format("it has {} tokens, but the largest rank is {}", found, tokens.size() - 1));
  }
  result.byte_ids.fill(-1);
  for (size_t rank = 0; rank < tokens.size(); ++rank) {
    if (tokens[rank].size() != 1) continue;
    result.byte_ids[static_cast<uint8_t>(tokens[rank][0])] = static_cast<int32_t>(rank);
  }
  for (int b = 0; b < 256; ++b) {
    const bool in_utf8 = b != 0xC0 && b != 0xC1 && b < 0xF5;
    if (in_utf8 && result.byte_ids[static_cast<size_t>(b)] < 0) {
      return Status::invalid(
          fmt::format("it has no token for the byte 0x{:02X}, so text with it would be lost", b));
    }
  }
  return result;
}

std::vector<Bpe::Merge> TiktokenVocabulary::merges() const {
  std::unordered_map<std::string_view, int32_t> ids;
  ids.reserve(tokens.size());
  // Of tokens with the same bytes the first counts.
  for (size_t i = 0; i < tokens.size(); ++i) ids.try_emplace(tokens[i], static_cast<int32_t>(i));
  std::vector<Bpe::Merge> merges;
  for (const auto& [bytes, id] : ids) {
    for (size_t cut = 1; cut < bytes.size(); ++cut) {
      const auto left = ids.find(bytes.substr(0, cut));
      if (left == ids.end()) continue;
      const auto right = ids.find(bytes.substr(cut));
      if (right != ids.end()) merges.push_back({left->second, right->second, id, id});
    }
  }
  return merges;
}

}  // namespace sortie::text
