#include "exchange/conformance.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace sortie::exchange {
namespace {

constexpr int kTopk = 4;
constexpr int64_t kHidden = 24;
constexpr int64_t kRowBytes = 100;

uint64_t mix(uint64_t x) {  // a plain 64-bit finaliser: any good bits do
  x = (x ^ (x >> 31)) * 0x9e3779b97f4a7c15U;
  x = (x ^ (x >> 29)) * 0xbf58476d1ce4e5b9U;
  return x ^ (x >> 32);
}
uint64_t mix(uint64_t a, uint64_t b, uint64_t c, uint64_t d = 0) {
  return mix(mix(mix(mix(a) + b) + c) + d);
}

struct Batch {
  int64_t tokens;
  std::vector<int32_t> ids;
  std::vector<float> weights;
  std::vector<std::byte> rows;
};

std::byte row_byte(uint64_t seed, int rank, int64_t token, int64_t i) {
  return static_cast<std::byte>(mix(seed, static_cast<uint64_t>(rank), static_cast<uint64_t>(token),
                                    static_cast<uint64_t>(i / 8)) >>
                                (i % 8 * 8));
}

Batch make_batch(uint64_t seed, int rank, int64_t limit, int experts, int64_t row_bytes) {
  const uint64_t r = mix(seed, static_cast<uint64_t>(rank), 99);
  Batch b{.tokens = r % 5 == 0 ? 0 : r % 5 == 1 ? limit : static_cast<int64_t>(r >> 8) % limit};
  if (b.tokens < 0) b.tokens = -b.tokens;
  for (int64_t i = 0; i < b.tokens * kTopk; ++i) {
    const uint64_t v = mix(seed, static_cast<uint64_t>(rank), 7, static_cast<uint64_t>(i));
    // A few ids of a few experts, so that repetitions and idle ranks occur; a fifth are -1.
    const bool none = v % 5 == 0;
    const auto range = v % 3 == 0 ? uint64_t{2} : static_cast<uint64_t>(experts);
    b.ids.push_back(none ? -1 : static_cast<int32_t>((v >> 16) % range));
    b.weights.push_back(static_cast<float>(v >> 40));
  }
  for (int64_t t = 0; t < b.tokens; ++t) {
    for (int64_t i = 0; i < row_bytes; ++i) b.rows.push_back(row_byte(seed, rank, t, i));
  }
  return b;
}

float part_value(uint64_t seed, int expert_rank, int home, int64_t token, int64_t h) {
  return static_cast<float>(
      mix(seed, static_cast<uint64_t>(expert_rank) * 64 + static_cast<uint64_t>(home),
          static_cast<uint64_t>(token), static_cast<uint64_t>(h)) >>
      40);
}

// The lists by nested loops, from the definition.
std::string check_lists(const ExpertRows& rows, const std::vector<Batch>& all, uint64_t seed) {
  std::vector<std::vector<int32_t>> by_slot(static_cast<size_t>(rows.slots));
  int32_t entry = 0;
  for (int e = 0; e < rows.local_experts; ++e) {
    if (rows.offsets[e] != entry) return fmt::format("offset of local expert {}", e);
    for (int source = 0; source < rows.ranks; ++source) {
      const Batch& b = all[static_cast<size_t>(source)];
      for (int64_t i = 0; i < b.tokens * kTopk; ++i) {
        if (b.ids[static_cast<size_t>(i)] != rows.rank * rows.local_experts + e) continue;
        const int64_t token = i / kTopk;
        const int64_t slot = source * rows.max_tokens + token;
        const int64_t row = source * rows.row_stride + token;
        if (rows.row_index[entry] != row) {
          return fmt::format("entry {}: row {} instead of {}", entry, rows.row_index[entry], row);
        }
        if (rows.row_weight[entry] != b.weights[static_cast<size_t>(i)]) {
          return fmt::format("entry {}: wrong weight", entry);
        }
        if (std::memcmp(rows.rows + row * rows.row_bytes, b.rows.data() + token * rows.row_bytes,
                        static_cast<size_t>(rows.row_bytes)) != 0) {
          return fmt::format("entry {}: wrong row of rank {} token {}, seed {}", entry, source,
                             token, seed);
        }
        by_slot[static_cast<size_t>(slot)].push_back(entry++);
      }
    }
  }
  if (rows.offsets[rows.local_experts] != entry || rows.entries != entry) return "entry count";
  for (int64_t slot = 0; slot < rows.slots; ++slot) {
    const int32_t* begin = rows.slot_entries + rows.slot_offsets[slot];
    const int32_t* end = rows.slot_entries + rows.slot_offsets[slot + 1];
    const auto& want = by_slot[static_cast<size_t>(slot)];
    if (!std::equal(begin, end, want.begin(), want.end())) {
      return fmt::format("entries of slot {}", slot);
    }
  }
  return "";
}

std::string check_parts(const CombinedParts& parts, int64_t slots, const Batch& own,
                        uint64_t members, int rank, int local_experts, uint64_t seed) {
  for (int from = 0; from < parts.ranks; ++from) {
    for (int64_t t = 0; t < slots; ++t) {
      const int64_t slot = from * parts.max_tokens + t;
      bool want = false;
      for (int k = 0; t < own.tokens && k < kTopk; ++k) {
        const int32_t id = own.ids[static_cast<size_t>(t * kTopk + k)];
        want = want || (id >= 0 && id / local_experts == from && (members >> from & 1) != 0);
      }
      if ((parts.present[slot] != 0) != want) {
        return fmt::format("presence of the part of token {} from rank {}", t, from);
      }
      for (int64_t h = 0; want && h < kHidden; ++h) {
        if (parts.rows_of<float>()[slot * kHidden + h] != part_value(seed, from, rank, t, h)) {
          return fmt::format("part of token {} from rank {}", t, from);
        }
      }
    }
  }
  return "";
}

std::string one_layer(Exchange& exchange, uint64_t seed, int layer, bool prefill) {
  const Options& o = exchange.options();
  const bool normal = o.mode == Mode::kNormal || (o.mode == Mode::kAuto && prefill);
  const int64_t limit = normal ? o.max_normal_tokens : o.max_dispatch_tokens;
  const auto row_bytes = static_cast<int64_t>(4 + seed % 25 * 4);
  std::vector<Batch> all;
  all.reserve(static_cast<size_t>(exchange.size()));
  for (int r = 0; r < exchange.size(); ++r) {
    all.push_back(make_batch(seed, r, limit, o.experts, row_bytes));
    if ((exchange.members() >> r & 1) == 0) all.back() = {};
  }
  const Batch& own = all[static_cast<size_t>(exchange.rank())];
  auto rows = exchange.dispatch({.layer = layer,
                                 .any_prefill = prefill,
                                 .rows = own.rows.data(),
                                 .row_bytes = row_bytes,
                                 .tokens = own.tokens,
                                 .ids = own.ids.data(),
                                 .weights = own.weights.data()});
  if (!rows) return rows.status().message();
  if (std::string s = check_lists(*rows, all, seed); !s.empty()) return "dispatch: " + s;

  float* out = exchange.parts_buffer();
  for (int64_t slot = 0; slot < rows->slots; ++slot) {
    if (rows->slot_offsets[slot + 1] == rows->slot_offsets[slot]) continue;
    const auto home = static_cast<int>(slot / rows->max_tokens);
    for (int64_t h = 0; h < kHidden; ++h) {
      out[slot * kHidden + h] = part_value(seed, exchange.rank(), home, slot % rows->max_tokens, h);
    }
  }
  auto parts = exchange.combine(layer, out);
  if (!parts) return parts.status().message();
  std::string s = check_parts(*parts, rows->max_tokens, own, exchange.members(), exchange.rank(),
                              o.experts / exchange.size(), seed);
  return s.empty() ? s : "combine: " + s;
}

}  // namespace

Options conformance_options(int ranks, Mode mode) {
  return {.experts = ranks * 3,
          .topk = kTopk,
          .hidden = kHidden,
          .widest_row_bytes = kRowBytes,
          .max_dispatch_tokens = 5,
          .max_normal_tokens = 17,
          .mode = mode,
          .spin = false,
          .poison = true};
}

std::string conform(Exchange& exchange, uint64_t seed, int steps) {
  for (int step = 0; step < steps; ++step) {
    const uint64_t s = mix(seed, static_cast<uint64_t>(step), 1);
    const StepHeader mine{.epoch = static_cast<uint64_t>(step),
                          .prefill_rows = exchange.rank(),
                          .decode_rows = static_cast<int32_t>(s & 0xffff)};
    auto headers = exchange.all_gather(mine);
    if (!headers) return headers.status().message();
    for (int r = 0; r < exchange.size(); ++r) {
      const StepHeader& h = (*headers)[static_cast<size_t>(r)];
      if ((exchange.members() >> r & 1) == 0) continue;
      if (h.epoch != mine.epoch || h.prefill_rows != r || h.decode_rows != mine.decode_rows) {
        return fmt::format("step {}: header of rank {}", step, r);
      }
    }
    const auto layers = static_cast<int>(1 + s % 3);
    for (int layer = 0; layer < layers; ++layer) {
      std::string e = one_layer(exchange, s + static_cast<uint64_t>(layer), layer, s >> 20 & 1);
      if (!e.empty()) return fmt::format("step {} layer {}: {}", step, layer, e);
    }
    if (Status s = exchange.settle(); !s.is_ok()) return s.message();
  }
  return "";
}

}  // namespace sortie::exchange
