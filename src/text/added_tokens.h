#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace sortie::text {

// A token that is matched as it stands, before pre-tokenising.
struct AddedToken {
  int32_t id = 0;
  std::string content;
  bool special = false;
  bool lstrip = false;       // swallows the white space before it
  bool rstrip = false;       // … and after it
  bool single_word = false;  // only where no letter or digit touches it
  bool normalized = false;   // looked for after those that are not
};

// Finds added tokens in text, leftmost first and the longest of those that begin at one place.
class AddedTokens {
 public:
  // A stretch of text that is either one added token (id >= 0) or ordinary text (id -1).
  struct Span {
    std::string_view text;
    int32_t id;
  };

  AddedTokens() : tries_(2) {}
  explicit AddedTokens(std::vector<AddedToken> tokens);

  void split(std::string_view text, std::vector<Span>& spans) const;

 private:
  struct Trie {
    std::vector<bool> begins = std::vector<bool>(256, false);
    std::unordered_map<uint64_t, uint32_t> children;  // node << 8 | byte
    std::vector<int32_t> ends = {-1};                 // node -> index of the token that ends there
    void add(std::string_view content, int32_t token);
    // The longest token at the front of `text`: its index, or -1.
    int32_t match(std::string_view text) const;
  };
  void split_by(const Trie& trie, std::string_view text, std::vector<Span>& spans) const;

  std::vector<AddedToken> tokens_;
  std::vector<Trie> tries_;  // not normalized ones, then the others
};

}  // namespace sortie::text
