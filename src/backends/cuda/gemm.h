#pragma once

#include <cstdint>

#include "ops/ops.h"

// What all GEMMs here come down to: many matrices [n, k] at equal distances, each times some rows.
namespace sortie::cuda {

struct GemmArgs {
  const std::byte* x = nullptr;  // rows of activations
  int64_t x_row_bytes = 0;
  int64_t x_group_bytes = 0;   // from one group's rows to the next's
  int64_t x_scale_offset = 0;  // in a row
  float static_scale = 0;      // kE4m3Static
  bool has_row_scale = false;  // kE4m3Token, kInt8Token: one scale a row

  const int32_t* row_index = nullptr;  // [entries] row of x, or null: the entry's own number
  const int32_t* offsets = nullptr;    // [groups + 1] entries by group, or null: `rows` each
  int rows = 0;                        // of each group; with offsets the most that one can have
  int groups = 1;
  int parts = 1;  // matrices a group

  const std::byte* w = nullptr;  // [groups * parts] matrices
  int64_t w_bytes = 0;           // from one matrix to the next
  const std::byte* w_scales = nullptr;
  int64_t w_scale_bytes = 0;
  int64_t w_row_bytes = 0;
  int n = 0;
  int k = 0;

  const float* bias = nullptr;  // [n]
  float* y32 = nullptr;         // one of the three takes the results
  bf16* y16 = nullptr;
  int64_t y_stride = 0;        // elements from row to row
  int64_t y_group_stride = 0;  // and from one group's rows to the next's
  uint8_t* y8 = nullptr;       // of two parts, gate and up: silu(gate) * up as e4m3 codes
  int64_t y8_row_bytes = 0;
  float y8_scale = 0;

  bool aligned = false;  // rows of w and x can be read 16 bytes at a time
};

// K is cut into chunks of 128 (a quantisation group) and these, whole, into segments for the warps
// of a block; a segment is summed from zero in ascending K, the segments are added in ascending
// order. Both depend on K alone, so a result's bits do not depend on rows, tiles or grid.
constexpr int kChunk = 128;
constexpr int kWarpsOfBlock = 8;
constexpr int k_segments(int64_t k) {
  const int64_t chunks = (k + kChunk - 1) / kChunk;
  int segments = kWarpsOfBlock;
  while (segments > chunks && segments > 1) segments /= 2;
  return segments;
}

// Token columns (eighths) that a block takes at once.
constexpr int token_tiles(int64_t rows) {
  return rows <= 8 ? 1 : rows <= 16 ? 2 : rows <= 32 ? 4 : 8;
}

void gemm_bf16(const GemmArgs& a, const ops::Context& c);
void gemm_f32(const GemmArgs& a, const ops::Context& c);
void gemm_fp8_block(const GemmArgs& a, const ops::Context& c);
void gemm_w4afp8(const GemmArgs& a, const ops::Context& c);
void gemm_w8a8_int8(const GemmArgs& a, const ops::Context& c);

// By the matrices' format.
void gemm(quant::Format format, GemmArgs a, const ops::Context& c);

}  // namespace sortie::cuda
