// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) over the paged cache.
// Scores are dot products of the gemm kernel, values are summed by `accumulate`, keys ascending;
// over a bf16 cache decode has a kernel of its own where the set supplies one.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "backends/cpu/drivers.h"
#include "quant/matrix_ops.h"

namespace sortie::cpu {

namespace {

using quant::ceil_div;
using quant::Format;

// Keys a block, counted from position 0 or from the segment's start: 64 latents of 576 floats stay
// in the second-level cache for all heads and both passes.
constexpr int64_t kKeys = kBlockKeys;

const std::byte* latent(const ops::Mla& a, const int32_t* pages, int64_t key) {
  return a.cache.row(pages[key / a.cache.page_size], key % a.cache.page_size);
}

// Rows of w_kv_b as accumulate and gemm take them: where they lie, or dequantised to fp32 a few at
// a time. Held in fp32 they would be four times the traffic of the codes.
constexpr int64_t kDequantised = 8;  // rows at a time: 16 KB of 512 columns
bool is_plain(Format f) { return f == Format::kF32 || f == Format::kBf16; }

void dequantise_row(const ops::Matrix& w, int64_t row, const Kernels& k, float* out) {
  if (k.dequantise == nullptr) return quant::dequantise_row(w, row, out);
  const float* scales = w.format == Format::kFp8Block
                            ? w.f32_scales() + row / quant::kGroup * w.k_groups()
                            : w.f32_scales() + row;
  k.dequantise(w.format, w.row(row), scales, w.k, out);
}

// Rows [first, first + n); `space` [n, k] holds quantised ones.
ops::Matrix rows_of(const ops::Matrix& w, int64_t first, int64_t n, float* space,
                    const Kernels& k) {
  ops::Matrix part{.format = w.format, .n = n, .k = w.k, .codes = w.row(first)};
  if (is_plain(w.format)) return part;
  for (int64_t i = 0; i < n; ++i) dequantise_row(w, first + i, k, space + i * w.k);
  part.format = Format::kF32;
  part.codes = reinterpret_cast<const std::byte*>(space);
  return part;
}
int64_t first_uk(const ops::Mla& a, int64_t head) { return head * (a.nope + a.v_dim); }
int64_t first_uv(const ops::Mla& a, int64_t head) { return first_uk(a, head) + a.nope; }
// fn(first row, rows, a matrix of them) over rows [first, first + n), in pieces where they have to
// be dequantised.
template <typename F>
void each_piece(const ops::Matrix& w, int64_t first, int64_t n, float* space, const Kernels& k,
                const F& fn) {
  const int64_t step = is_plain(w.format) ? n : kDequantised;
  for (int64_t i = 0; i < n; i += step) {
    const int64_t rows = std::min(step, n - i);
    fn(i, rows, rows_of(w, first + i, rows, space, k));
  }
}
int64_t dequantised_floats(const ops::Mla& a, int64_t rows) {
  return is_plain(a.w_kv_b.format) ? 0 : rows * a.lora;
}

// The buffers that a panel of fp32 rows needs.
struct PanelSpace {
  std::byte* prepared;  // [kPanelRows] x row_bytes
  int64_t row_bytes;
  float* unpacked;  // [the largest k]
};

PanelSpace panel_space(Format format, int64_t k, const ops::Context& c, const Kernels& kernels) {
  const int64_t bytes = kernels.prepared_bytes(format, k);
  return {.prepared = c.scratch.alloc<std::byte>(kPanelRows * bytes),
          .row_bytes = bytes,
          .unpacked = c.scratch.alloc<float>(k)};
}

// A panel of prepared rows against all rows of w. rows[i].out is set by the caller.
void multiply_prepared(const ops::Matrix& w, const GemmRow* rows, int64_t count,
                       const PanelSpace& space, const Kernels& k) {
  k.gemm({.format = w.format,
          .packed = false,
          .w = w.codes,
          .w_stride = w.code_row_bytes(),
          .w_scales = nullptr,
          .k = w.k,
          .n_begin = 0,
          .n_end = w.n,
          .rows = rows,
          .count = count,
          .scratch = space.unpacked});
}

// fp32 rows of any number, a panel at a time. rows[i].x and .out are set by the caller; x points at
// what was prepared afterwards, which lasts for the last panel.
void multiply(const ops::Matrix& w, GemmRow* rows, int64_t count, const PanelSpace& space,
              const Kernels& k) {
  const bool prepare = k.prepared_bytes(w.format, w.k) > 0;
  for (int64_t first = 0; first < count; first += kPanelRows) {
    const int64_t panel = std::min(kPanelRows, count - first);
    for (int64_t i = 0; prepare && i < panel; ++i) {
      std::byte* to = space.prepared + i * space.row_bytes;
      k.prepare(w.format, rows[first + i].x, w.k, to);
      rows[first + i].x = to;
    }
    multiply_prepared(w, rows + first, panel, space, k);
  }
}

GemmRow gemm_row(const float* x, float* out) {
  return {.x = reinterpret_cast<const std::byte*>(x), .scales = nullptr, .out = out};
}

// One online softmax's state: c / sum is the result.
struct State {
  float max;
  float sum;
};
constexpr State kFresh = {-std::numeric_limits<float>::infinity(), 0};

// ---- decode

// What decode computes between its three passes.
struct Decode {
  const ops::Mla& a;
  const Kernels& k;
  int64_t width;    // lora + rope_dim
  int64_t segment;  // S
  float* query;     // [tokens, heads, width]: the query in latent space, then its roped part
  int64_t* first;   // [tokens + 1] prefix sums of segments
  State* states;    // [segments, heads]
  float* contexts;  // [segments, heads, lora]

  // attend_prepare's form of the queries, [tokens, groups of kLaneHeads][lane_bytes()], or null
  // where attention is not made in lanes.
  std::byte* lanes;
  int64_t lane_groups() const { return ceil_div(a.heads, kLaneHeads); }
  int64_t lane_bytes() const { return width / 2 * kLaneHeads * 4; }

  int64_t segments(int64_t t) const { return ceil_div(int64_t{a.positions[t]} + 1, segment); }
};

// What a thread needs in the passes over w_kv_b.
struct WeightSpace {
  const void** pointers;  // [nope]
  float* factors;         // [tokens] zeros, then [tokens] ones
  float* dequantised;     // [kDequantised, lora]
  GemmRow* rows;          // [tokens]
  PanelSpace panel;
};

// query[t][h] = W_UK[h]^T q_nope, for all tokens.
void absorb(const Decode& d, int64_t head, const WeightSpace& space) {
  const ops::Mla& a = d.a;
  const int64_t q_stride = a.heads * (a.nope + a.rope_dim);
  const float* q = a.q + head * (a.nope + a.rope_dim);
  float* query = d.query + head * d.width;
  each_piece(a.w_kv_b, first_uk(a, head), a.nope, space.dequantised, d.k,
             [&](int64_t first, int64_t rows, const ops::Matrix& w) {
               for (int64_t i = 0; i < rows; ++i) space.pointers[i] = w.row(i);
               d.k.accumulate({.c = query,
                               .c_stride = a.heads * d.width,
                               .factor = space.factors + (first == 0 ? 0 : a.tokens),
                               .a = q + first,
                               .a_stride = q_stride,
                               .b = space.pointers,
                               .b_is_bf16 = w.format == Format::kBf16,
                               .rows = a.tokens,
                               .depth = rows,
                               .columns = a.lora});
             });
  for (int64_t t = 0; t < a.tokens; ++t) {
    std::copy_n(q + t * q_stride + a.nope, a.rope_dim, query + t * a.heads * d.width + a.lora);
  }
}

// The buffers of one thread in `attend` and `attend_in_lanes`.
struct AttendSpace {
  const void** keys;  // [2 * kKeys]
  float* block;       // [kBlockScratch] in lanes, which needs nothing else
  GemmRow* rows;      // [heads]
  float* scores;      // [heads, kKeys]
  float* factors;     // [heads]
  PanelSpace panel;
};

// Heads [head, head + count) of row t over its segment s, from a fresh state.
void attend(const Decode& d, int64_t t, int64_t s, int64_t head, int64_t count,
            const AttendSpace& space) {
  const ops::Mla& a = d.a;
  const int64_t at = (d.first[t] + s) * a.heads + head;
  State* states = d.states + at;
  std::fill_n(states, count, kFresh);
  const int64_t end = std::min((s + 1) * d.segment, int64_t{a.positions[t]} + 1);
  for (int64_t begin = s * d.segment; begin < end; begin += kKeys) {
    const int64_t keys = std::min(kKeys, end - begin);
    for (int64_t i = 0; i < keys; ++i) space.keys[i] = latent(a, a.page_tables[t], begin + i);
    // Neighbours within a page are the rows of a matrix.
    for (int64_t i = 0; i < keys;) {
      const int64_t run = std::min(keys - i, a.cache.page_size - (begin + i) % a.cache.page_size);
      for (int64_t h = 0; h < count; ++h) {
        space.rows[h] =
            gemm_row(d.query + (t * a.heads + head + h) * d.width, space.scores + h * kKeys + i);
      }
      multiply({.format = a.cache.format,
                .n = run,
                .k = d.width,
                .codes = static_cast<const std::byte*>(space.keys[i])},
               space.rows, count, space.panel, d.k);
      i += run;
    }
    for (int64_t h = 0; h < count; ++h) {
      space.factors[h] = d.k.softmax_block(space.scores + h * kKeys, keys, a.scale, &states[h].max,
                                           &states[h].sum);
    }
    d.k.accumulate({.c = d.contexts + at * a.lora,
                    .c_stride = a.lora,
                    .factor = space.factors,
                    .a = space.scores,
                    .a_stride = kKeys,
                    .b = space.keys,
                    .b_is_bf16 = a.cache.format == Format::kBf16,
                    .rows = count,
                    .depth = keys,
                    .columns = a.lora});
  }
}

// The same for the heads of a lane group.
void attend_in_lanes(const Decode& d, int64_t t, int64_t s, int64_t group,
                     const AttendSpace& space) {
  const ops::Mla& a = d.a;
  const int64_t head = group * kLaneHeads;
  const int64_t heads = std::min(kLaneHeads, a.heads - head);
  const int64_t at = (d.first[t] + s) * a.heads + head;
  float max[kLaneHeads];
  float sum[kLaneHeads] = {};
  std::fill_n(max, kLaneHeads, kFresh.max);
  const int64_t end = std::min((s + 1) * d.segment, int64_t{a.positions[t]} + 1);
  const auto locate = [&](int64_t begin, const void** keys) {
    const int64_t n = std::clamp<int64_t>(end - begin, 0, kKeys);
    for (int64_t i = 0; i < n; ++i) keys[i] = latent(a, a.page_tables[t], begin + i);
    return n;
  };
  const void** keys = space.keys;
  const void** next = space.keys + kKeys;
  int64_t count = locate(s * d.segment, keys);
  for (int64_t begin = s * d.segment; begin < end; begin += kKeys) {
    const int64_t next_count = locate(begin + kKeys, next);
    d.k.attend({.keys = keys,
                .count = count,
                .next = next,
                .next_count = next_count,
                .width = d.width,
                .lora = a.lora,
                .queries = d.lanes + (t * d.lane_groups() + group) * d.lane_bytes(),
                .heads = heads,
                .scale = a.scale,
                .max = max,
                .sum = sum,
                .context = d.contexts + at * a.lora,
                .scratch = space.block});
    std::swap(keys, next);
    count = next_count;
  }
  for (int64_t h = 0; h < heads; ++h) d.states[at + h] = {max[h], sum[h]};
}

// Folds a row's segments into the first, ascending, and divides.
void merge(const Decode& d, int64_t t, int64_t head) {
  const int64_t lora = d.a.lora;
  const int64_t at = d.first[t] * d.a.heads + head;
  State& state = d.states[at];
  float* context = d.contexts + at * lora;
  for (int64_t s = 1; s < d.segments(t); ++s) {
    const int64_t next_at = at + s * d.a.heads;
    const State& next = d.states[next_at];
    const float* from = d.contexts + next_at * lora;
    const float max = std::max(state.max, next.max);
    const float keep = std::exp(state.max - max);
    const float weight = std::exp(next.max - max);
    for (int64_t i = 0; i < lora; ++i) context[i] = context[i] * keep + from[i] * weight;
    state = {max, state.sum * keep + next.sum * weight};
  }
  for (int64_t i = 0; i < lora; ++i) context[i] /= state.sum;
}

// out[t][h] = W_UV[h] context, for all tokens.
void project(const Decode& d, int64_t head, const WeightSpace& space) {
  const ops::Mla& a = d.a;
  for (int64_t t = 0; t < a.tokens; ++t) merge(d, t, head);
  each_piece(a.w_kv_b, first_uv(a, head), a.v_dim, space.dequantised, d.k,
             [&](int64_t first, int64_t /*rows*/, const ops::Matrix& w) {
               for (int64_t t = 0; t < a.tokens; ++t) {
                 space.rows[t] = gemm_row(d.contexts + (d.first[t] * a.heads + head) * a.lora,
                                          a.out + (t * a.heads + head) * a.v_dim + first);
               }
               multiply(w, space.rows, a.tokens, space.panel, d.k);
             });
}

// Heads that walk a segment together, up to 16 that share each block of latents (with 8 the cache
// is read twice as often); fewer where threads would otherwise have nothing to do, but in lanes.
int64_t heads_together(const Decode& d, int64_t segments, int threads) {
  if (d.lanes != nullptr) return kLaneHeads;
  int64_t heads = std::min<int64_t>(16, d.a.heads);
  while (heads > 2 && segments * ceil_div(d.a.heads, heads) < threads) heads /= 2;
  return heads;
}

void attend_all(const Decode& d, const ops::Context& c) {
  const ops::Mla& a = d.a;
  const int64_t segments = d.first[a.tokens];
  const int64_t together = heads_together(d, segments, c.threads.size());
  const int64_t groups = ceil_div(a.heads, together);
  Arena::Scope scope(c.scratch);
  auto* spaces = c.scratch.alloc<AttendSpace>(c.threads.size());
  for (int i = 0; i < c.threads.size(); ++i) {
    spaces[i].keys = c.scratch.alloc<const void*>(2 * kKeys);
    if (d.lanes != nullptr) {
      spaces[i].block = c.scratch.alloc<float>(kBlockScratch);
      continue;
    }
    spaces[i].rows = c.scratch.alloc<GemmRow>(together);
    spaces[i].scores = c.scratch.alloc<float>(together * kKeys);
    spaces[i].factors = c.scratch.alloc<float>(together);
    spaces[i].panel = panel_space(a.cache.format, d.width, c, d.k);
  }
  run_shared(c, segments * a.heads * d.width, [&](int thread, int threads) {
    const Share share = share_of(segments * groups, thread, threads);
    int64_t t = 0;
    for (int64_t i = share.begin; i < share.end; ++i) {
      while (i / groups >= d.first[t + 1]) ++t;
      const int64_t segment = i / groups - d.first[t];
      const int64_t group = i % groups;
      if (d.lanes != nullptr) {
        attend_in_lanes(d, t, segment, group, spaces[thread]);
        continue;
      }
      const int64_t head = group * together;
      attend(d, t, segment, head, std::min(together, a.heads - head), spaces[thread]);
    }
  });
}

// ---- prefill

// The buffers of one thread.
struct PrefillSpace {
  GemmRow* rows;       // [max(kKeys, tokens)]
  float* latents;      // [kKeys, width] a bf16 cache's
  float* keys;         // [kKeys, nope + rope_dim]
  float* values;       // [kKeys, v_dim]
  const void** value;  // [kKeys] its rows
  float* scores;       // [tokens, kKeys]
  float* factors;      // [tokens]
  State* states;       // [tokens]
  float* dequantised;  // [nope + v_dim, lora]
  PanelSpace panel;
};

// W_UK and W_UV of a head.
struct HeadWeights {
  ops::Matrix uk;
  ops::Matrix uv;
};

// Keys and values of one head for positions [begin, begin + keys).
void expand(const ops::Mla& a, const HeadWeights& w, int64_t begin, int64_t keys,
            const PrefillSpace& space, const Kernels& k) {
  const int64_t key_width = a.nope + a.rope_dim;
  for (int64_t i = 0; i < keys; ++i) {
    const std::byte* cached = latent(a, a.page_tables[0], begin + i);
    const auto* row = reinterpret_cast<const float*>(cached);
    if (a.cache.format != Format::kF32) {
      float* widened = space.latents + i * a.cache.width;
      quant::dequantise_row({.format = a.cache.format, .k = a.cache.width, .codes = cached}, 0,
                            widened);
      row = widened;
    }
    space.rows[i] = gemm_row(row, space.keys + i * key_width);
    std::copy_n(row + a.lora, a.rope_dim, space.keys + i * key_width + a.nope);
  }
  multiply(w.uk, space.rows, keys, space.panel, k);
  static_assert(kKeys <= kPanelRows);  // so that the rows are still there
  for (int64_t i = 0; i < keys; ++i) space.rows[i].out = space.values + i * a.v_dim;
  multiply_prepared(w.uv, space.rows, keys, space.panel, k);
}

void prefill_block(const ops::Mla& a, int64_t head, int64_t begin, int64_t keys,
                   const PrefillSpace& space, const Kernels& k) {
  const int64_t key_width = a.nope + a.rope_dim;
  const int64_t first = std::max<int64_t>(0, begin - a.positions[0]);  // earlier rows see no key
  for (int64_t t = first; t < a.tokens; ++t) {
    space.rows[t - first] =
        gemm_row(a.q + (t * a.heads + head) * key_width, space.scores + t * kKeys);
  }
  multiply({.format = Format::kF32,
            .n = keys,
            .k = key_width,
            .codes = reinterpret_cast<const std::byte*>(space.keys)},
           space.rows, a.tokens - first, space.panel, k);
  // A row sees the keys up to its own position and touches no other: rows that see the whole block
  // go together, the others alone.
  const auto add_values = [&](int64_t t, int64_t rows, int64_t depth) {
    k.accumulate({.c = a.out + (t * a.heads + head) * a.v_dim,
                  .c_stride = a.heads * a.v_dim,
                  .factor = space.factors + t,
                  .a = space.scores + t * kKeys,
                  .a_stride = kKeys,
                  .b = space.value,
                  .b_is_bf16 = false,
                  .rows = rows,
                  .depth = depth,
                  .columns = a.v_dim});
  };
  for (int64_t t = first; t < a.tokens; ++t) {
    const int64_t seen = std::min(keys, a.positions[t] - begin + 1);
    space.factors[t] = k.softmax_block(space.scores + t * kKeys, seen, a.scale,
                                       &space.states[t].max, &space.states[t].sum);
    if (seen == keys) {
      for (int64_t rest = t + 1; rest < a.tokens; ++rest) {
        space.factors[rest] = k.softmax_block(space.scores + rest * kKeys, keys, a.scale,
                                              &space.states[rest].max, &space.states[rest].sum);
      }
      add_values(t, a.tokens - t, keys);
      return;
    }
    add_values(t, 1, seen);
  }
}

void prefill_head(const ops::Mla& a, int64_t head, const PrefillSpace& space, const Kernels& k) {
  std::fill_n(space.states, a.tokens, kFresh);
  for (int64_t i = 0; i < kKeys; ++i) space.value[i] = space.values + i * a.v_dim;
  const HeadWeights w = {
      rows_of(a.w_kv_b, first_uk(a, head), a.nope, space.dequantised, k),
      rows_of(a.w_kv_b, first_uv(a, head), a.v_dim, space.dequantised + a.nope * a.lora, k)};
  const int64_t end = int64_t{a.positions[a.tokens - 1]} + 1;
  for (int64_t begin = 0; begin < end; begin += kKeys) {
    const int64_t keys = std::min(kKeys, end - begin);
    expand(a, w, begin, keys, space, k);
    prefill_block(a, head, begin, keys, space, k);
  }
  for (int64_t t = 0; t < a.tokens; ++t) {
    float* out = a.out + (t * a.heads + head) * a.v_dim;
    for (int64_t i = 0; i < a.v_dim; ++i) out[i] /= space.states[t].sum;
  }
}

}  // namespace

void mla_decode(const ops::Mla& a, const ops::Context& c, const Kernels& k) {
  if (a.tokens == 0) return;
  Arena::Scope scope(c.scratch);
  CHECK(a.segment > 0, "a decode segment has keys");
  Decode d{.a = a, .k = k, .width = a.lora + a.rope_dim, .segment = a.segment};
  d.query = c.scratch.alloc<float>(a.tokens * a.heads * d.width);
  d.lanes = nullptr;
  if (k.attend != nullptr && a.cache.format == Format::kBf16 && d.width % 2 == 0 &&
      a.lora % 16 == 0) {
    d.lanes = c.scratch.alloc<std::byte>(a.tokens * d.lane_groups() * d.lane_bytes());
  }
  d.first = c.scratch.alloc<int64_t>(a.tokens + 1);
  d.first[0] = 0;
  for (int64_t t = 0; t < a.tokens; ++t) d.first[t + 1] = d.first[t] + d.segments(t);
  d.states = c.scratch.alloc<State>(d.first[a.tokens] * a.heads);
  d.contexts = c.scratch.alloc<float>(d.first[a.tokens] * a.heads * a.lora);

  const int threads = c.threads.size();
  auto* factors = c.scratch.alloc<float>(2 * a.tokens);
  std::fill_n(factors, a.tokens, 0.0f);
  std::fill_n(factors + a.tokens, a.tokens, 1.0f);
  auto* spaces = c.scratch.alloc<WeightSpace>(threads);
  for (int i = 0; i < threads; ++i) {
    spaces[i] = {.pointers = c.scratch.alloc<const void*>(a.nope),
                 .factors = factors,
                 .dequantised = c.scratch.alloc<float>(dequantised_floats(a, kDequantised)),
                 .rows = c.scratch.alloc<GemmRow>(a.tokens),
                 .panel = panel_space(a.w_kv_b.format, a.lora, c, k)};
  }
  const int64_t work = a.tokens * a.w_kv_b.n * a.lora / 2;
  run_shared(c, work, [&](int thread, int of) {
    const Share share = share_of(a.heads, thread, of);
    for (int64_t h = share.begin; h < share.end; ++h) absorb(d, h, spaces[thread]);
  });
  if (d.lanes != nullptr) {
    run_shared(c, a.tokens * a.heads * d.width, [&](int thread, int of) {
      const Share share = share_of(a.tokens * d.lane_groups(), thread, of);
      for (int64_t i = share.begin; i < share.end; ++i) {
        const int64_t head = i % d.lane_groups() * kLaneHeads;
        k.attend_prepare(d.query + (i / d.lane_groups() * a.heads + head) * d.width,
                         std::min(kLaneHeads, a.heads - head), d.width,
                         d.lanes + i * d.lane_bytes());
      }
    });
  }
  attend_all(d, c);
  run_shared(c, work, [&](int thread, int of) {
    const Share share = share_of(a.heads, thread, of);
    for (int64_t h = share.begin; h < share.end; ++h) project(d, h, spaces[thread]);
  });
}

void mla_prefill(const ops::Mla& a, const ops::Context& c, const Kernels& k) {
  if (a.tokens == 0) return;
  Arena::Scope scope(c.scratch);
  const int64_t key_width = a.nope + a.rope_dim;
  const bool is_f32 = a.cache.format == Format::kF32;
  auto* spaces = c.scratch.alloc<PrefillSpace>(c.threads.size());
  for (int i = 0; i < c.threads.size(); ++i) {
    spaces[i] = {.rows = c.scratch.alloc<GemmRow>(std::max(kKeys, a.tokens)),
                 .latents = c.scratch.alloc<float>(is_f32 ? 0 : kKeys * a.cache.width),
                 .keys = c.scratch.alloc<float>(kKeys * key_width),
                 .values = c.scratch.alloc<float>(kKeys * a.v_dim),
                 .value = c.scratch.alloc<const void*>(kKeys),
                 .scores = c.scratch.alloc<float>(a.tokens * kKeys),
                 .factors = c.scratch.alloc<float>(a.tokens),
                 .states = c.scratch.alloc<State>(a.tokens),
                 .dequantised = c.scratch.alloc<float>(dequantised_floats(a, a.nope + a.v_dim)),
                 .panel = panel_space(a.w_kv_b.format, std::max(a.lora, key_width), c, k)};
  }
  run_shared(c, a.tokens * a.heads * a.lora * key_width, [&](int thread, int threads) {
    const Share share = share_of(a.heads, thread, threads);
    for (int64_t h = share.begin; h < share.end; ++h) prefill_head(a, h, spaces[thread], k);
  });
}

}  // namespace sortie::cpu
