#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

namespace sortie::text {

// Byte-pair merging (Sennrich et al., 2016) of one word: its bytes become ids, and the adjacent
// pair of lowest rank is merged, leftmost first, until no pair is in the table.
class Bpe {
 public:
  struct Merge {
    int32_t left;
    int32_t right;
    int32_t result;
    int32_t rank;
  };
  // Working memory that a caller keeps between words.
  struct Scratch {
    struct Symbol {
      int32_t id;
      int32_t previous;
      int32_t next;
    };
    struct Candidate {
      uint64_t key;  // rank, then place: the order of merging
      int32_t left;  // the pair as it was when this was pushed; a stale one is skipped
      int32_t right;
    };
    std::vector<Symbol> symbols;
    std::vector<Candidate> heap;
  };

  Bpe() = default;
  // Of equal pairs the last counts. byte_ids[b] < 0: no token.
  Bpe(const std::array<int32_t, 256>& byte_ids, const std::vector<Merge>& merges);

  // Appends the word's ids. O(n log n) in its length.
  void encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& ids) const;

 private:
  struct Slot {
    uint64_t pair = kEmpty;
    int32_t rank = 0;
    int32_t result = 0;
  };
  static constexpr uint64_t kEmpty = ~uint64_t{0};

  static uint64_t pair_key(int32_t left, int32_t right) {
    return (static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32) |
           static_cast<uint32_t>(right);
  }
  size_t home(uint64_t pair) const {
    return static_cast<size_t>((pair * 0x9E3779B97F4A7C15u) >> shift_);
  }
  const Slot* find(int32_t left, int32_t right) const;
  void push(Scratch& scratch, int32_t at) const;

  std::array<int32_t, 256> byte_ids_{};
  std::vector<Slot> table_;  // open addressing, at most half full
  int shift_ = 63;
};

}  // namespace sortie::text
