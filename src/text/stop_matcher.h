#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace sortie::text {

// Looks for stop strings in a stream of text and lets through what can no longer be part of one.
// The stop that is completed first wins (of those completed by the same byte the longest), so the
// result does not depend on how the text is cut into pieces.
class StopMatcher {
 public:
  // Empty stop strings are ignored.
  explicit StopMatcher(std::vector<std::string> stops);

  // The text that is free to go out now. After a match: nothing more.
  std::string push(std::string_view piece);
  // What was held back, when the stream ends without a match.
  std::string finish();

  // Which stop string was met, as an index of the constructor's list, or -1.
  int matched() const { return matched_; }

 private:
  struct Stop {
    std::string text;
    int index;
    std::vector<size_t> border;  // Knuth-Morris-Pratt: longest proper border of each prefix
    size_t state = 0;            // how much of `text` the stream's end spells
  };
  std::vector<Stop> stops_;
  std::string held_;
  int matched_ = -1;
};

}  // namespace sortie::text
