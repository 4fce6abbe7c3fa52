#include "text/bpe.h"

#include <algorithm>
#include <bit>

namespace sortie::text {
namespace {

// std heaps keep the largest in front; the smallest key is merged first.
constexpr auto kLater = [](const Bpe::Scratch::Candidate& a, const Bpe::Scratch::Candidate& b) {
  return a.key > b.key;
};

}  // namespace

Bpe::Bpe(const std::array<int32_t, 256>& byte_ids, const std::vector<Merge>& merges)
    : byte_ids_(byte_ids) {
  const size_t capacity = std::bit_ceil(std::max<size_t>(2, merges.size() * 2));
  shift_ = 64 - std::countr_zero(capacity);
  table_.resize(capacity);
  for (const Merge& merge : merges) {
    const uint64_t pair = pair_key(merge.left, merge.right);
    size_t i = home(pair);
    while (table_[i].pair != kEmpty && table_[i].pair != pair) i = (i + 1) & (capacity - 1);
    table_[i] = {pair, merge.rank, merge.result};
  }
}

const Bpe::Slot* Bpe::find(int32_t left, int32_t right) const {
  const uint64_t pair = pair_key(left, right);
  for (size_t i = home(pair);; i = (i + 1) & (table_.size() - 1)) {
    if (table_[i].pair == pair) return &table_[i];
    if (table_[i].pair == kEmpty) return nullptr;
  }
}

void Bpe::push(Scratch& scratch, int32_t at) const {
  const auto& left = scratch.symbols[static_cast<size_t>(at)];
  if (left.next < 0) return;
  const auto& right = scratch.symbols[static_cast<size_t>(left.next)];
  const Slot* slot = find(left.id, right.id);
  if (slot == nullptr) return;
  const uint64_t key =
      (static_cast<uint64_t>(static_cast<uint32_t>(slot->rank)) << 32) | static_cast<uint32_t>(at);
  scratch.heap.push_back({key, left.id, right.id});
  std::push_heap(scratch.heap.begin(), scratch.heap.end(), kLater);
}

void Bpe::encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& ids) const {
  auto& symbols = scratch.symbols;
  symbols.clear();
  scratch.heap.clear();
  for (const char c : word) {
    const int32_t id = byte_ids_[static_cast<uint8_t>(c)];
    if (id < 0) continue;
    const auto at = static_cast<int32_t>(symbols.size());
    symbols.push_back({id, at - 1, at + 1});
  }
  if (symbols.empty()) return;
  symbols.back().next = -1;
  const auto count = static_cast<int32_t>(symbols.size());
  for (int32_t at = 0; at < count; ++at) push(scratch, at);

  while (!scratch.heap.empty()) {
    const Scratch::Candidate best = scratch.heap.front();
    std::pop_heap(scratch.heap.begin(), scratch.heap.end(), kLater);
    scratch.heap.pop_back();
    const auto at = static_cast<int32_t>(best.key & 0xFFFFFFFFu);
    auto& left = symbols[static_cast<size_t>(at)];
    if (left.id != best.left || left.next < 0) continue;
    auto& right = symbols[static_cast<size_t>(left.next)];
    if (right.id != best.right) continue;
    left.id = find(best.left, best.right)->result;
    left.next = right.next;
    right.id = -1;  // out of the list; a candidate that begins here is stale
    if (left.next >= 0) symbols[static_cast<size_t>(left.next)].previous = at;
    if (left.previous >= 0) push(scratch, left.previous);
    push(scratch, at);
  }
  for (int32_t at = 0; at >= 0; at = symbols[static_cast<size_t>(at)].next) {
    ids.push_back(symbols[static_cast<size_t>(at)].id);
  }
}

}  // namespace sortie::text
