#pragma once

#include <cstddef>
#include <cstdint>

#include "quant/matrix.h"

// What an instruction set supplies to the drivers. Plain structs and pointers: the files compiled
// with -mavx* or -mamx* include this header and no other of ours, and call no inline function of
// it. An inline function that two files share is kept once by the linker, and the kept copy could
// be the one that only some processors can run.
namespace sortie::cpu {

// One activation row of a panel.
struct GemmRow {
  const std::byte* x;   // as `prepare` left it; fp32 rows are used where they lie
  const float* scales;  // kFp8Block: [ceil(k/128)]
  float scale;          // kW4Afp8, kW8A8Int8
  int32_t sum;          // kW8A8Int8: the sum of the codes
  float* out;           // out[n] is written for n in the panel's range
};

// out[r][n] = x[r] . w[n] for some rows and a range of weight rows, by the format's rule.
constexpr int64_t kPanelRows = 64;
constexpr int64_t kPanelColumns = 4;  // n_begin is a multiple of it
// Columns of a tile of packed weights (tiles.h); n_begin of a packed panel is a multiple of it.
constexpr int64_t kTileColumns = 64;
struct Panel {
  quant::Format format;
  bool packed;  // only where tile_bytes() > 0
  const std::byte*
      w;  // row n lies at w + n * w_stride; packed: tile n / 64 at w + n / 64 * w_stride
  int64_t w_stride;
  const void* w_scales;
  const int32_t* sum_bias;  // kW8A8Int8: [n], added to the integer sums, or null
  int64_t k;
  int64_t n_begin;
  int64_t n_end;
  const GemmRow* rows;
  int64_t count;   // at most kPanelRows
  float* scratch;  // [k] floats
};

// c[r] = c[r] * factor[r] + sum over i of a[r][i] * b[i], i ascending, each step one fma (generic:
// product, then sum). factor 0 starts from zero and does not read c.
struct Accumulate {
  float* c;  // [rows, columns], rows c_stride apart
  int64_t c_stride;
  const float* factor;  // [rows]
  const float* a;       // [rows, depth], rows a_stride apart
  int64_t a_stride;
  const void* const* b;  // [depth] rows of `columns` floats, or bf16
  bool b_is_bf16;
  int64_t rows;
  int64_t depth;
  int64_t columns;
};

// Attention of up to 16 heads over a block of bf16 latents, by products of bf16: the query and the
// exponentials are rounded to it, sums are fp32. A vector's lanes are heads; what lane h computes
// depends on head h alone.
constexpr int64_t kLaneHeads = 16;
constexpr int64_t kBlockKeys = 64;
constexpr int64_t kBlockScratch = (kBlockKeys + kBlockKeys / 2) * kLaneHeads;  // floats
struct AttendBlock {
  const void* const* keys;  // [count] latents of `width` bf16, `lora` of them the values
  int64_t count;            // 1 to kBlockKeys
  const void* const* next;  // [next_count] latents that will be wanted next: asked for meanwhile
  int64_t next_count;
  int64_t width;             // even
  int64_t lora;              // a multiple of 16
  const std::byte* queries;  // as attend_prepare left them
  int64_t heads;
  float scale;
  // One online softmax a head: context / sum is the result. max -inf: nothing was summed yet, and
  // the context is not read.
  float* max;      // [kLaneHeads]
  float* sum;      // [kLaneHeads]
  float* context;  // [heads, lora]
  float* scratch;  // [kBlockScratch], 64-byte aligned
};

struct Kernels {
  // Activation codes in the form the set's gemm wants them. Bytes of a row of k, 0 = as they are.
  int64_t (*prepared_bytes)(quant::Format format, int64_t k);
  // Returns the sum of the codes (kW8A8Int8).
  int32_t (*prepare)(quant::Format format, const std::byte* codes, int64_t k, std::byte* out);
  void (*gemm)(const Panel& panel);
  // Bytes of a packed tile of k channels, 0 = `gemm` reads this format in rows. Null: all formats.
  int64_t (*tile_bytes)(quant::Format format, int64_t k);
  void (*accumulate)(const Accumulate& args);

  // A row of kFp8Block or kW8A8Int8 in fp32: code * scale, of each 128 channels or of the row.
  // Null: the plain loop's.
  void (*dequantise)(quant::Format format, const std::byte* codes, const float* scales, int64_t k,
                     float* out);

  // One block of an online softmax: s[i] = exp(s[i] * scale - new max), `max` and `sum` updated;
  // returns exp(old max - new max), by which what was summed before must be multiplied.
  float (*softmax_block)(float* s, int64_t n, float scale, float* max, float* sum);

  // Null: attention over bf16 latents is made of gemm, softmax_block and accumulate.
  // q [heads, width] -> pairs of bf16 [width / 2, kLaneHeads], 64-byte aligned.
  void (*attend_prepare)(const float* q, int64_t heads, int64_t width, std::byte* out);
  void (*attend)(const AttendBlock& block);

  uint32_t (*amax_bits)(const float* x, int64_t n);  // as quant/amax.h
  void (*e4m3_codes)(const float* x, int64_t n, float scale, uint8_t* codes);
  void (*int8_codes)(const float* x, int64_t n, float multiplier, int8_t* codes);
  float (*sum_squares)(const float* x, int64_t n);
  void (*norm)(const float* x, const float* weight, float scale, int64_t n, float* out);
  void (*silu_mul)(const float* gate, const float* up, int64_t n, float* out);
  void (*add)(const float* x, int64_t n, float* sum);  // sum += x
  // sum = weight * x, or sum += weight * x uncontracted.
  void (*weigh)(const float* x, float weight, int64_t n, bool first, float* sum);

  // For probe.h: the sum of a piece of memory (bytes a multiple of 512), and `rounds` of
  // independent multiply-adds of an Arithmetic; returns how many operations they were.
  uint64_t (*read)(const std::byte* p, int64_t bytes);
  int64_t (*multiply)(int arithmetic, int64_t rounds);
};

// tiles.h: the bytes of a packed tile; 0 for formats without one.
int64_t tile_bytes(quant::Format format, int64_t k);

extern const Kernels kGenericKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512bwKernels;
extern const Kernels kAvx512Kernels;
// kAvx512Kernels with the three of amx.cc, where the compiler knows tiles (SORTIE_HAS_AMX).
extern const Kernels kAmxKernels;
int64_t amx_prepared_bytes(quant::Format format, int64_t k);
int32_t amx_prepare(quant::Format format, const std::byte* codes, int64_t k, std::byte* out);
void amx_gemm(const Panel& panel);
#endif

}  // namespace sortie::cpu
