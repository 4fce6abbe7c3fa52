// Multi-head latent attention, absorbed, for decode and prefill alike (DeepSeek-V2, arXiv
// 2405.04434, section 2.1.2): queries move into the latent space, so that 16 heads share each
// latent that is read.
//
//   1. q_latent[t, h] = W_UK[h]^T q_nope[t, h]           a GEMM per head, rounded to bf16
//   2. attention over latents                             this file
//   3. out[t, h] = W_UV[h] context[t, h]                  a GEMM per head
//
// A block of 2 has 8 warps, one token and 16 heads, and walks blocks of 64 keys counted from
// position 0: keys to shared memory, scores [16 x 64] (a warp 8 keys), softmax in fp32 (16 lanes a
// head), then values: the latents again (a warp up to 64 of 512 columns). Probabilities are rounded
// to bf16 before they are summed, so numerator and denominator agree.
//
// Decode cuts the keys at multiples of S; each segment is folded from a fresh state by a block of
// its own, and the segments are merged in ascending order. Prefill is one segment.
//
// Bound in decode: the latents' bytes, once per 16 heads out of L2. Not yet done: keys are not
// fetched ahead, and prefill reads the latents again for every token.
#include <cfloat>

#include "backends/cuda/gemm.h"
#include "backends/cuda/kernel.cuh"
#include "backends/cuda/mla.h"
#include "backends/cuda/ops.h"
#include "backends/cuda/ptx.cuh"

namespace sortie::cuda {

namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kPairs = kMlaMostLatent / 16 / kWarps;  // of 8-column tiles, a warp's

struct AttendArgs {
  const bf16* q_latent;  // [tokens, heads, lora]
  const bf16* q;         // [tokens, heads, nope + rope]
  int heads, nope, rope, lora;
  float scale;
  int64_t segment;  // keys
  const int32_t* positions;
  const int32_t* const* page_tables;
  const bf16* cache;
  int64_t page_size;
  bf16* context;   // [tokens, heads, lora], if there are no partials
  float* partial;  // [tokens, heads, segments, lora]
  float* state;    // [tokens, heads, segments, 2]: maximum and sum
  int segments;
};

// Copies `n` values; zeros from there to `padded`. `at` counts lanes of a group of 32.
__device__ void copy_row(bf16* to, const bf16* from, int n, int padded, int lane) {
  const bool wide =
      n % 8 == 0 && (reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to)) % 16 == 0;
  if (wide) {
    for (int i = lane * 8; i < n; i += kWarp * 8) {
      *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
    }
  } else {
    for (int i = lane; i < n; i += kWarp) to[i] = from[i];
  }
  for (int i = n + lane; i < padded; i += kWarp) to[i] = bf16{};
}

__global__ void __launch_bounds__(kThreads) attend(const __grid_constant__ AttendArgs a) {
  extern __shared__ __align__(16) std::byte shared[];
  const int width = a.lora + a.rope;
  const int padded = (width + 15) / 16 * 16;
  const int row = padded + 8;
  auto* queries = reinterpret_cast<bf16*>(shared);                               // [16, row]
  bf16* keys = queries + kMlaHeads * row;                                        // [64, row]
  auto* scores = reinterpret_cast<float*>(keys + kMlaKeys * row);                // [16, 68]
  auto* weights = reinterpret_cast<bf16*>(scores + kMlaHeads * (kMlaKeys + 4));  // [16, 72]
  auto* maximum = reinterpret_cast<float*>(weights + kMlaHeads * (kMlaKeys + 8));
  float* total = maximum + kMlaHeads;
  float* factor = total + kMlaHeads;

  const int segment = static_cast<int>(blockIdx.x);
  const int first_head = static_cast<int>(blockIdx.y) * kMlaHeads;
  const int64_t token = blockIdx.z;
  const int64_t end_key = int64_t{a.positions[token]} + 1;
  const int64_t begin = segment * a.segment;
  const int64_t end = min(end_key, begin + a.segment);
  if (begin >= end) return;
  const int heads = min(kMlaHeads, a.heads - first_head);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int32_t* pages = a.page_tables[token];

  for (int h = warp; h < kMlaHeads; h += kWarps) {
    const int64_t head = token * a.heads + first_head + h;
    bf16* to = queries + h * row;
    if (h < heads) {
      copy_row(to, a.q_latent + head * a.lora, a.lora, a.lora, lane);
      copy_row(to + a.lora, a.q + head * (a.nope + a.rope) + a.nope, a.rope, padded - a.lora, lane);
    } else {
      copy_row(to, nullptr, 0, padded, lane);
    }
  }
  if (threadIdx.x < kMlaHeads) {
    maximum[threadIdx.x] = -INFINITY;
    total[threadIdx.x] = 0;
  }
  float out[kPairs][2][4] = {};  // pair p of this warp: columns 16 * (warp + 8 p), 8 and 8
  const int pairs = (a.lora + 15) / 16;

  for (int64_t block = begin; block < end; block += kMlaKeys) {
    const int count = static_cast<int>(min(end - block, int64_t{kMlaKeys}));
    __syncthreads();  // the values of the block before are read
    for (int k = warp; k < kMlaKeys; k += kWarps) {
      if (k < count) {
        const int64_t key = block + k;
        const int64_t at = int64_t{pages[key / a.page_size]} * a.page_size + key % a.page_size;
        copy_row(keys + k * row, a.cache + at * width, width, padded, lane);
      } else {
        copy_row(keys + k * row, nullptr, 0, padded, lane);
      }
    }
    __syncthreads();

    // Scores of this warp's 8 keys.
    float s[4] = {};
    for (int k = 0; k < padded; k += 32) {
      const int rest = padded - k;  // 16 or at least 32
      uint32_t b[4];                // keys' columns k, k + 8, k + 16, k + 24
      const int column = min(k + lane / 8 * 8, padded - 8);
      ptx::ldmatrix(b, keys + (warp * 8 + lane % 8) * row + column);
      uint32_t q[4];
      const bf16* at = queries + (lane % 16) * row + k + lane / 16 * 8;
      ptx::ldmatrix(q, at);
      ptx::mma_bf16(s, q, b[0], b[1]);
      if (rest >= 32) {
        ptx::ldmatrix(q, at + 16);
        ptx::mma_bf16(s, q, b[2], b[3]);
      }
    }
    const int g = lane / 4;
    const int c = warp * 8 + lane % 4 * 2;
    for (int j = 0; j < 4; ++j) scores[(g + j / 2 * 8) * (kMlaKeys + 4) + c + j % 2] = s[j];
    __syncthreads();

    // Softmax: 16 lanes a head, 4 keys a lane.
    {
      const int h = static_cast<int>(threadIdx.x) / 16;
      const int at = static_cast<int>(threadIdx.x) % 16;
      float v[4];
      float largest = maximum[h];
      const float before = largest;
      for (int j = 0; j < 4; ++j) {
        const int key = at + 16 * j;
        v[j] = key < count ? scores[h * (kMlaKeys + 4) + key] * a.scale : -INFINITY;
        largest = fmaxf(largest, v[j]);
      }
      for (int d = 8; d > 0; d /= 2) largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, d));
      float sum = 0;
      for (int j = 0; j < 4; ++j) {
        const bf16 p = round_bf16(expf(v[j] - largest));
        weights[h * (kMlaKeys + 8) + at + 16 * j] = p;
        sum += f32(p);
      }
      for (int d = 8; d > 0; d /= 2) sum += __shfl_xor_sync(kAll, sum, d);
      if (at == 0) {
        const float f = expf(before - largest);
        factor[h] = f;
        maximum[h] = largest;
        total[h] = fmaf(total[h], f, sum);
      }
    }
    __syncthreads();

    // Values: out = out * factor + weights * latents.
    uint32_t p[kMlaKeys / 16][4];
    for (int k = 0; k < kMlaKeys / 16; ++k) {
      ptx::ldmatrix(p[k], weights + (lane % 16) * (kMlaKeys + 8) + k * 16 + lane / 16 * 8);
    }
    const float f[2] = {factor[g], factor[g + 8]};
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int pair = warp + kWarps * i;
      if (pair >= pairs) continue;
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out[i][tile][j] *= f[j / 2];
      }
#pragma unroll
      for (int k = 0; k < kMlaKeys / 16; ++k) {
        uint32_t v[4];  // keys 0-7 and 8-15 of columns 0-7, then of columns 8-15
        ptx::ldmatrix_transposed(v, keys + (k * 16 + lane % 16) * row + pair * 16 + lane / 16 * 8);
        ptx::mma_bf16(out[i][0], p[k], v[0], v[1]);
        ptx::mma_bf16(out[i][1], p[k], v[2], v[3]);
      }
    }
  }

  const int g = lane / 4;
  for (int half = 0; half < 2; ++half) {
    const int h = g + half * 8;
    if (h >= heads) continue;
    const int64_t head = token * a.heads + first_head + h;
    const int64_t place = head * a.segments + segment;
    const float sum = total[h];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int column = (warp + kWarps * i) * 16 + j / 2 * 8 + lane % 4 * 2 + j % 2;
        if (column >= a.lora) continue;
        const float v = out[i][j / 2][half * 2 + j % 2];
        if (a.partial == nullptr) {
          a.context[head * a.lora + column] = round_bf16(v / sum);
        } else {
          a.partial[place * a.lora + column] = v;
        }
      }
    }
    if (a.partial != nullptr && warp == 0 && lane % 4 == 0) {
      a.state[place * 2] = maximum[h];
      a.state[place * 2 + 1] = sum;
    }
  }
}

// Merges a head's segments in ascending order.
__global__ void merge_segments(const __grid_constant__ AttendArgs a) {
  const int64_t head = blockIdx.x;
  const int64_t token = head / a.heads;
  const int segments = static_cast<int>(a.positions[token] / a.segment) + 1;
  const float* state = a.state + head * a.segments * 2;
  for (int column = static_cast<int>(threadIdx.x); column < a.lora;
       column += static_cast<int>(blockDim.x)) {
    const float* part = a.partial + head * a.segments * a.lora + column;
    float maximum = state[0];
    float total = state[1];
    float value = part[0];
    for (int s = 1; s < segments; ++s) {
      const float largest = fmaxf(maximum, state[2 * s]);
      const float old_factor = expf(maximum - largest);
      const float new_factor = expf(state[2 * s] - largest);
      value = fmaf(value, old_factor, part[int64_t{s} * a.lora] * new_factor);
      total = fmaf(total, old_factor, state[2 * s + 1] * new_factor);
      maximum = largest;
    }
    a.context[head * a.lora + column] = round_bf16(value / total);
  }
}

void mla(const ops::MlaOf<bf16>& a, bool decode, const Context& c) {
  if (a.tokens == 0) return;
  CHECK(a.lora <= kMlaMostLatent && a.w_kv_b.format == quant::Format::kBf16);
  const Arena::Scope scope(c.scratch);
  const int64_t rows = a.tokens * a.heads;
  auto* q_latent = c.scratch.alloc<bf16>(rows * a.lora);
  auto* context = c.scratch.alloc<bf16>(rows * a.lora);
  const int64_t head_bytes = (a.nope + a.v_dim) * a.lora * 2;
  gemm(quant::Format::kBf16,
       {.x = reinterpret_cast<const std::byte*>(a.q),
        .x_row_bytes = a.heads * (a.nope + a.rope_dim) * 2,
        .x_group_bytes = (a.nope + a.rope_dim) * 2,
        .rows = static_cast<int>(a.tokens),
        .groups = a.heads,
        .w = a.w_kv_b.codes,
        .w_bytes = head_bytes,
        .w_row_bytes = a.nope * 2,
        .n = static_cast<int>(a.lora),
        .k = static_cast<int>(a.nope),
        .y16 = q_latent,
        .y_stride = a.heads * a.lora,
        .y_group_stride = a.lora},
       c);

  AttendArgs args{.q_latent = q_latent,
                  .q = a.q,
                  .heads = a.heads,
                  .nope = static_cast<int>(a.nope),
                  .rope = static_cast<int>(a.rope_dim),
                  .lora = static_cast<int>(a.lora),
                  .scale = a.scale,
                  .segment = decode ? a.segment : int64_t{1} << 40,
                  .positions = a.positions,
                  .page_tables = a.page_tables,
                  .cache = reinterpret_cast<const bf16*>(a.cache.base),
                  .page_size = a.cache.page_size,
                  .context = context,
                  .segments = 1};
  if (decode) {
    args.segments = static_cast<int>((a.keys + a.segment - 1) / a.segment);
    args.partial = c.scratch.alloc<float>(rows * args.segments * a.lora);
    args.state = c.scratch.alloc<float>(rows * args.segments * 2);
  }
  const auto shared = static_cast<size_t>(mla_shared_bytes(a.lora, a.rope_dim));
  allow_shared(attend, shared);
  const dim3 grid(static_cast<unsigned>(args.segments),
                  static_cast<unsigned>((a.heads + kMlaHeads - 1) / kMlaHeads),
                  static_cast<unsigned>(a.tokens));
  SORTIE_LAUNCH(attend, grid, kThreads, shared, c, args);
  if (decode) SORTIE_LAUNCH(merge_segments, static_cast<unsigned>(rows), 128, 0, c, args);

  gemm(quant::Format::kBf16,
       {.x = reinterpret_cast<const std::byte*>(context),
        .x_row_bytes = a.heads * a.lora * 2,
        .x_group_bytes = a.lora * 2,
        .rows = static_cast<int>(a.tokens),
        .groups = a.heads,
        .w = a.w_kv_b.codes + a.nope * a.lora * 2,
        .w_bytes = head_bytes,
        .w_row_bytes = a.lora * 2,
        .n = static_cast<int>(a.v_dim),
        .k = static_cast<int>(a.lora),
        .y16 = a.out,
        .y_stride = a.heads * a.v_dim,
        .y_group_stride = a.v_dim},
       c);
}

}  // namespace

void mla_prefill(const ops::MlaOf<bf16>& a, const Context& c) { mla(a, false, c); }
void mla_decode(const ops::MlaOf<bf16>& a, const Context& c) { mla(a, true, c); }

}  // namespace sortie::cuda
