// linear and grouped_gemm: which thread computes which columns of which expert.
#include <algorithm>

#include "backends/cpu/drivers.h"
#include "backends/cpu/tiles.h"

namespace sortie::cpu {

namespace {

using quant::ActFormat;
using quant::ceil_div;

// Rows of activations, by index or compact.
struct Inputs {
  ops::Rows rows;
  const float* plain;  // fp32 rows of distance plain_stride instead, or null
  int64_t plain_stride;
  const int32_t* index;  // or null
};

// The scratch of one thread.
struct Workspace {
  GemmRow* rows;        // [kPanelRows]
  std::byte* prepared;  // [kPanelRows] x row_bytes
  int64_t row_bytes;
  float* unpacked;  // [k]
  std::byte* tile;  // one packed tile, for weights that were left in rows; or null
};

// Whether the set wants this format's weights in tiles; ones in rows are then packed in passing.
bool in_tiles(const ops::Matrix& w, const Kernels& k) {
  return k.tile_bytes != nullptr && k.tile_bytes(w.format, w.k) > 0;
}
// Columns that are one piece of work.
int64_t step_columns(const ops::Matrix& w, const Kernels& k) {
  return in_tiles(w, k) ? kTileColumns : kPanelColumns;
}

Workspace* make_workspaces(const ops::Context& c, const Kernels& k, const ops::Matrix& w,
                           int64_t rows) {
  const int threads = c.threads.size();
  auto* all = c.scratch.alloc<Workspace>(threads);
  rows = std::min(rows, kPanelRows);
  const bool pack = in_tiles(w, k) && w.layout == quant::Layout::kRows;
  for (int t = 0; t < threads; ++t) {
    const int64_t bytes = k.prepared_bytes(w.format, w.k);
    all[t] = {.rows = c.scratch.alloc<GemmRow>(rows),
              .prepared = c.scratch.alloc<std::byte>(rows * bytes),
              .row_bytes = bytes,
              .unpacked = c.scratch.alloc<float>(w.k),
              .tile = pack ? c.scratch.alloc<std::byte>(k.tile_bytes(w.format, w.k)) : nullptr};
  }
  return all;
}

// Rows [first, first + count) of the inputs, in the form that the kernels want.
void load_rows(const Inputs& in, const ops::Matrix& w, int64_t first, int64_t count,
               const Workspace& space, const Kernels& k) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t t = in.index == nullptr ? first + i : in.index[first + i];
    GemmRow& row = space.rows[i];
    row = {};
    if (in.plain != nullptr) {
      row.x = reinterpret_cast<const std::byte*>(in.plain + t * in.plain_stride);
    } else {
      row.x = in.rows.row(t);
      row.scales = in.rows.scales(t);
      if (in.rows.format == ActFormat::kE4m3Static) {
        row.scale = in.rows.static_scale;
      } else if (quant::act_scales(in.rows.format, in.rows.k) > 0) {
        row.scale = row.scales[0];
      }
    }
    if (space.row_bytes == 0) continue;
    std::byte* prepared = space.prepared + i * space.row_bytes;
    row.sum = k.prepare(w.format, row.x, w.k, prepared);
    row.x = prepared;
  }
}

// The loaded rows against columns [begin, end) of one matrix; out: the first row's column 0.
void multiply(const ops::Matrix& w, int64_t begin, int64_t end, int64_t count, float* out,
              int64_t out_stride, const float* bias, const Workspace& space, const Kernels& k) {
  for (int64_t i = 0; i < count; ++i) space.rows[i].out = out + i * out_stride;
  Panel panel{.format = w.format,
              .packed = in_tiles(w, k),
              .w = w.codes,
              .w_stride = w.code_row_bytes(),
              .w_scales = w.scales,
              .sum_bias = w.sum_bias,
              .k = w.k,
              .n_begin = begin,
              .n_end = end,
              .rows = space.rows,
              .count = count,
              .scratch = space.unpacked};
  if (panel.packed) panel.w_stride = k.tile_bytes(w.format, w.k);
  if (space.tile == nullptr) {
    k.gemm(panel);
  } else {
    for (int64_t n = begin; n < end; n += kTileColumns) {
      pack_tile(w, n / kTileColumns, space.tile);
      panel.w = space.tile - n / kTileColumns * panel.w_stride;
      panel.n_begin = n;
      panel.n_end = std::min(end, n + kTileColumns);
      k.gemm(panel);
    }
  }
  if (bias == nullptr) return;
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t n = begin; n < end; ++n) out[i * out_stride + n] += bias[n];
  }
}

// Equal pieces of at most kPanelRows.
int64_t panel_rows(int64_t count) {
  return ceil_div(count, std::max<int64_t>(1, ceil_div(count, kPanelRows)));
}

void dense(const Inputs& in, int64_t tokens, const ops::Matrix& w, const float* bias, float* y,
           int64_t y_stride, const ops::Context& c, const Kernels& k) {
  if (tokens == 0 || w.n == 0) return;
  Arena::Scope scope(c.scratch);
  const Workspace* spaces = make_workspaces(c, k, w, tokens);
  const int64_t step = panel_rows(tokens);
  const int64_t width = step_columns(w, k);
  run_shared(c, tokens * w.n * w.k, [&](int thread, int threads) {
    const Share tiles = share_of(ceil_div(w.n, width), thread, threads);
    const int64_t begin = tiles.begin * width;
    const int64_t end = std::min(w.n, tiles.end * width);
    if (begin >= end) return;
    for (int64_t first = 0; first < tokens; first += step) {
      const int64_t count = std::min(step, tokens - first);
      load_rows(in, w, first, count, spaces[thread], k);
      multiply(w, begin, end, count, y + first * y_stride, y_stride, bias, spaces[thread], k);
    }
  });
}

// The tiles [begin, end) of one expert: part 0's columns, then part 1's.
void expert(const ops::GroupedGemm& a, int e, int64_t begin, int64_t end, const Workspace& space,
            const Kernels& k) {
  const ops::Matrix* w = a.w + int64_t{e} * a.parts;
  const int64_t n = w[0].n;
  const int64_t width = step_columns(w[0], k);
  const int64_t tiles = ceil_div(n, width);
  const int64_t rows = a.offsets[e + 1] - a.offsets[e];
  const int64_t step = panel_rows(rows);
  const Inputs in{.rows = a.x, .index = a.row_index};
  for (int64_t first = a.offsets[e]; first < a.offsets[e + 1]; first += step) {
    const int64_t count = std::min<int64_t>(step, a.offsets[e + 1] - first);
    load_rows(in, w[0], first, count, space, k);
    for (int part = 0; part < a.parts; ++part) {
      const int64_t from = std::clamp<int64_t>(begin - part * tiles, 0, tiles) * width;
      const int64_t to = std::clamp<int64_t>(end - part * tiles, 0, tiles) * width;
      if (from >= to) continue;
      multiply(w[part], from, std::min(n, to), count, a.out + (first * a.parts + part) * n,
               a.parts * n, nullptr, space, k);
    }
  }
}

// What a tile of an expert costs: reading its weights is worth about this many rows of arithmetic.
int64_t tile_cost(int64_t rows) { return rows == 0 ? 0 : 4 + rows; }

}  // namespace

void linear(const ops::Linear& a, const ops::Context& c, const Kernels& k) {
  CHECK(a.x.k == a.w.k && a.x.format == quant::act_format(a.w));
  dense({.rows = a.x}, a.x.count, a.w, a.bias, a.y, a.y_stride, c, k);
}

void multiply_f32(const float* x, int64_t tokens, int64_t x_stride, const ops::Matrix& w, float* y,
                  int64_t y_stride, const ops::Context& c, const Kernels& k) {
  dense({.plain = x, .plain_stride = x_stride}, tokens, w, nullptr, y, y_stride, c, k);
}

void grouped_gemm(const ops::GroupedGemm& a, const ops::Context& c, const Kernels& k) {
  if (a.local_experts == 0) return;
  const ops::Matrix& w = a.w[0];
  CHECK(a.x.k == w.k && a.x.format == quant::act_format(w));
  int64_t most = 0;
  int64_t total = 0;  // of the line of all experts' tiles, by cost
  const int64_t tiles = a.parts * ceil_div(w.n, step_columns(w, k));
  for (int e = 0; e < a.local_experts; ++e) {
    const int64_t rows = a.offsets[e + 1] - a.offsets[e];
    most = std::max(most, rows);
    total += tiles * tile_cost(rows);
  }
  if (total == 0) return;
  Arena::Scope scope(c.scratch);
  const Workspace* spaces = make_workspaces(c, k, w, most);
  run_shared(c, total * w.k, [&](int thread, int threads) {
    // A contiguous piece of the line: a thread's weights come as one stream.
    const Share share = share_of(total, thread, threads);
    int64_t at = 0;
    for (int e = 0; e < a.local_experts && at < share.end; ++e) {
      const int64_t cost = tile_cost(a.offsets[e + 1] - a.offsets[e]);
      if (cost == 0) continue;
      const int64_t begin = ceil_div(std::max<int64_t>(share.begin - at, 0), cost);
      const int64_t end = std::min(tiles, ceil_div(share.end - at, cost));
      if (begin < end) expert(a, e, begin, end, spaces[thread], k);
      at += tiles * cost;
    }
  });
}

}  // namespace sortie::cpu
