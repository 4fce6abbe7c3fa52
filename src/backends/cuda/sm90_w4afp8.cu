// w4afp8 grouped GEMM for decode: int4 weights stream through shared memory once, tokens are
// gathered by the lists.
//
//   block      persistent, one an SM; work items (expert, tile of 128 rows, tile of tokens) in turn
//   warp 0     one lane copies a stage of weights at a time (one bulk copy of 16.5 KiB)
//   warp 1     gathers the tokens' 256 bytes a stage by cp.async, swizzled for WGMMA
//   warps 4-11 two warpgroups of 64 rows: codes to e4m3 in registers (3 operations for 8 weights),
//              4 WGMMAs of k = 32 a group from zero; while they run the next group is converted;
//              then acc = fma(group sum, group scale, acc), groups ascending
//
// The weights are WGMMA's M side, so few tokens waste no tensor work: N is 16, 32 or 64.
// Bound: the weights' bytes. docs/kernels/w4afp8.md has what was measured.
#include "backends/cuda/kernel.cuh"
#include "backends/cuda/ptx_sm90.cuh"
#include "backends/cuda/sm90_w4afp8.h"

namespace sortie::cuda {

namespace {

constexpr int kThreads = 384;
constexpr int kConsumerWarps = 8;
constexpr int kMostExperts = 512;
constexpr int kTokenLag = 3;  // stages whose tokens are on their way

struct Item {
  int matrix;    // of all
  int row_tile;  // of 128
  int begin;     // first entry of its token tile
  int count;     // tokens in it
};

// Which items there are: experts' first items, and the total.
struct Items {
  const int* first;  // [groups + 1] in shared memory
  int row_tiles;
  int token_tile;

  __device__ Item at(const GemmArgs& a, int item) const {
    int low = 0;
    int high = a.groups;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (first[middle] <= item ? low : high) = middle;
    }
    const int begin = a.offsets[low];
    const int rows = a.offsets[low + 1] - begin;
    const int tiles = (rows + token_tile - 1) / token_tile;
    const int rest = item - first[low];
    const int tile = rest % tiles;  // innermost: neighbours share the weights
    const int row_tile = rest / tiles;
    return {low * a.parts + row_tile / row_tiles, row_tile % row_tiles, begin + tile * token_tile,
            min(token_tile, rows - tile * token_tile)};
  }
};

// One warp fills first[0 .. groups].
__device__ void count_items(const GemmArgs& a, int row_tiles, int token_tile, int* first) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int each = (a.groups + kWarp - 1) / kWarp;
  const int begin = min(lane * each, a.groups);
  const int end = min(begin + each, a.groups);
  const auto items_of = [&](int e) {
    const int rows = a.offsets[e + 1] - a.offsets[e];
    return (rows + token_tile - 1) / token_tile * row_tiles * a.parts;
  };
  int own = 0;
  for (int e = begin; e < end; ++e) own += items_of(e);
  int sum = own;
  for (int d = 1; d < kWarp; d *= 2) {
    const int other = __shfl_up_sync(kAll, sum, d);
    if (lane >= d) sum += other;
  }
  int at = sum - own;
  for (int e = begin; e < end; ++e) {
    first[e] = at;
    at += items_of(e);
  }
  if (lane == kWarp - 1) first[a.groups] = sum;
}

template <int TOKENS>
struct Shared {
  static constexpr int kStages = w4_stages(TOKENS);
  std::byte tokens[kStages][2][TOKENS * 128];  // by group; rows of 128 bytes, swizzled
  std::byte weights[kStages][kW4StageBytes];
  uint64_t full[kStages];
  uint64_t empty[kStages];
  int first[kMostExperts + 1];
};

struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  template <int STAGES>
  __device__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <int TOKENS>
__device__ void load_weights(const GemmArgs& a, Shared<TOKENS>& s, const Items& items, int total) {
  Ring ring;
  const int stages_of_k = a.k / kW4StageK;
  for (int i = static_cast<int>(blockIdx.x); i < total; i += static_cast<int>(gridDim.x)) {
    const Item item = items.at(a, i);
    const std::byte* from =
        a.w + item.matrix * a.w_bytes + int64_t{item.row_tile} * stages_of_k * kW4StageBytes;
    for (int k = 0; k < stages_of_k; ++k) {
      ptx::barrier_wait(&s.empty[ring.stage], ring.parity ^ 1);
      ptx::barrier_arrive_expecting(&s.full[ring.stage], kW4StageBytes);
      ptx::bulk_load(s.weights[ring.stage], from + int64_t{k} * kW4StageBytes, kW4StageBytes,
                     &s.full[ring.stage]);
      ring.advance<Shared<TOKENS>::kStages>();
    }
  }
}

template <int TOKENS>
__device__ void load_tokens(const GemmArgs& a, Shared<TOKENS>& s, const Items& items, int total) {
  constexpr int kStages = Shared<TOKENS>::kStages;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int stages_of_k = a.k / kW4StageK;
  const int piece = lane % 16;  // of the 256 bytes of a row
  Ring ring;
  Ring done;  // stages whose tokens have arrived
  int pending = 0;
  const auto finish_one = [&] {
    ptx::fence_async_proxy();
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(&s.full[done.stage]);
    done.advance<kStages>();
    --pending;
  };
  for (int i = static_cast<int>(blockIdx.x); i < total; i += static_cast<int>(gridDim.x)) {
    const Item item = items.at(a, i);
    const std::byte* rows[TOKENS / 2];  // this lane's: every second token
#pragma unroll
    for (int r = 0; r < TOKENS / 2; ++r) {
      const int entry = item.begin + min(2 * r + lane / 16, item.count - 1);
      const int64_t row = a.row_index == nullptr ? entry : a.row_index[entry];
      rows[r] = a.x + row * a.x_row_bytes + piece * 16;
    }
    for (int k = 0; k < stages_of_k; ++k) {
      ptx::barrier_wait(&s.empty[ring.stage], ring.parity ^ 1);
      const uint32_t to = ptx::shared_address(s.tokens[ring.stage][piece / 8]);
#pragma unroll
      for (int r = 0; r < TOKENS / 2; ++r) {
        const int token = 2 * r + lane / 16;
        if (token < item.count) {
          ptx::copy_async(to + static_cast<uint32_t>(token * 128 + (piece % 8 ^ token % 8) * 16),
                          rows[r] + k * kW4StageK);
        }
      }
      ptx::copy_commit();
      ring.advance<kStages>();
      if (++pending > kTokenLag) {
        ptx::copy_wait<kTokenLag>();
        finish_one();
      }
    }
  }
  ptx::copy_wait<0>();
  while (pending > 0) finish_one();
}

// One group of a half's 64 rows, as a thread holds it.
struct Group {
  uint32_t codes[4][4];  // e4m3, of k = 32 each
  uint32_t scales;       // two bf16

  __device__ void load(const std::byte* stage, int half, int group, int thread, int row) {
    const auto* from = reinterpret_cast<const uint4*>(stage) + (half * 2 + group) * 256 + thread;
    const uint4 vectors[2] = {from[0], from[128]};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint4 v = vectors[step / 2];
      const uint32_t words[2] = {step % 2 == 0 ? v.x : v.z, step % 2 == 0 ? v.y : v.w};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        codes[step][2 * h] = words[h] & 0x87878787u;
        codes[step][2 * h + 1] = __funnelshift_r(words[h], words[h], 4) & 0x87878787u;
      }
    }
    scales = *reinterpret_cast<const uint32_t*>(stage + kW4CodeBytes + (group * kW4Rows + row) * 2);
  }
};

template <int TOKENS>
__device__ void multiply(const GemmArgs& a, Shared<TOKENS>& s, const Items& items, int total) {
  constexpr int kStages = Shared<TOKENS>::kStages;
  constexpr int kSums = TOKENS / 2;
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const int half = static_cast<int>(threadIdx.x) / 128 - 1;
  const int lane = thread % kWarp;
  const int g = lane / 4;
  const int q = lane % 4;
  const int row = half * 64 + thread / kWarp * 16 + 2 * g;  // and the next one
  const int stages_of_k = a.k / kW4StageK;
  Ring ring;
  for (int i = static_cast<int>(blockIdx.x); i < total; i += static_cast<int>(gridDim.x)) {
    float acc[kSums] = {};
    float part[kSums];
    Group first;
    Group second;
    // Starts the group's products; whoever calls converts the next group before it waits for them.
    const auto start = [&](const Group& w, int group) {
      const uint64_t tile = ptx::swizzled_tile(s.tokens[ring.stage][group]);
      ptx::settle(part);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        ptx::wgmma_e4m3(part, w.codes[step], tile + 2 * step, step > 0 ? 1 : 0);
      }
      ptx::wgmma_commit();
    };
    const auto fold = [&](uint32_t scales) {
      ptx::wgmma_wait<0>();
      ptx::settle(part);
      const float u = __uint_as_float(scales << 16);
      const float v = __uint_as_float(scales & 0xffff0000u);
#pragma unroll
      for (int j = 0; j < kSums; ++j) acc[j] = fmaf(part[j], j % 4 < 2 ? u : v, acc[j]);
    };
    ptx::barrier_wait(&s.full[ring.stage], ring.parity);
    first.load(s.weights[ring.stage], half, 0, thread, row);
    for (int k = 0; k < stages_of_k; ++k) {
      start(first, 0);
      second.load(s.weights[ring.stage], half, 1, thread, row);
      fold(first.scales);
      start(second, 1);
      const int stage = ring.stage;
      ring.advance<kStages>();
      if (k + 1 < stages_of_k) {
        ptx::barrier_wait(&s.full[ring.stage], ring.parity);
        first.load(s.weights[ring.stage], half, 0, thread, row);
      }
      fold(second.scales);
      if (lane == 0) ptx::barrier_arrive(&s.empty[stage]);
    }

    const Item item = items.at(a, i);
    const int64_t column = (item.matrix % a.parts) * int64_t{a.n} + item.row_tile * kW4Rows + row;
#pragma unroll
    for (int j = 0; j < TOKENS / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int token = 8 * j + 2 * q + e;
        if (token >= item.count) continue;
        const int64_t entry = item.begin + token;
        float scale = a.static_scale;
        if (a.has_row_scale) {
          const int64_t x_row = a.row_index == nullptr ? entry : a.row_index[entry];
          scale = *reinterpret_cast<const float*>(a.x + x_row * a.x_row_bytes + a.x_scale_offset);
        }
        const float u = acc[4 * j + e] * scale;
        const float v = acc[4 * j + 2 + e] * scale;
        const int64_t to = entry * a.y_stride + column;
        if (a.y32 != nullptr) {
          *reinterpret_cast<float2*>(a.y32 + to) = make_float2(u, v);
        } else {
          const uint32_t pair = round_bf16(u).bits | uint32_t{round_bf16(v).bits} << 16;
          *reinterpret_cast<uint32_t*>(a.y16 + to) = pair;
        }
      }
    }
  }
}

template <int TOKENS>
__global__ void __launch_bounds__(kThreads, 1)
    sm90_w4afp8_kernel(const __grid_constant__ GemmArgs a) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& s = *reinterpret_cast<Shared<TOKENS>*>(memory);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const Items items{s.first, a.n / kW4Rows, TOKENS};
  if (warp == 0) {
    count_items(a, items.row_tiles, TOKENS, s.first);
  } else if (threadIdx.x == kWarp) {
    for (int i = 0; i < Shared<TOKENS>::kStages; ++i) {
      ptx::barrier_init(&s.full[i], 2);  // the weights' copy and the tokens' warp
      ptx::barrier_init(&s.empty[i], kConsumerWarps);
    }
    ptx::fence_async_proxy();
  }
  __syncthreads();
  const int total = s.first[a.groups];
  if (warp == 0) {
    if (threadIdx.x == 0) load_weights(a, s, items, total);
  } else if (warp == 1) {
    load_tokens(a, s, items, total);
  } else if (warp >= 4) {
    multiply(a, s, items, total);
  }
}

__global__ void arrange_codes(const uint8_t* codes, int64_t n, int64_t k, uint8_t* to) {
  // A thread writes one byte: it reads what belongs in its four fields.
  const int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (at >= n * k / 2) return;
  // The inverse of w4_place for the two codes whose magnitudes share a byte.
  const int64_t stage = at / kW4CodeBytes;
  const int64_t in_stage = at % kW4CodeBytes;
  const int64_t b = in_stage % 4;
  const int64_t word = in_stage / 4 % 4;
  const int64_t thread = in_stage / 16 % 128;
  const int64_t vector = in_stage / 2048;  // (half, group, s / 2)
  const int64_t half = vector / 4;
  const int64_t group = vector / 2 % 2;
  const int64_t s = vector % 2 * 2 + word / 2;
  const int64_t h = word % 2;
  const int64_t k_stages = k / kW4StageK;
  const int64_t row =
      stage / k_stages * kW4Rows + half * 64 + thread / 32 * 16 + thread % 32 / 4 * 2;
  const int64_t column =
      stage % k_stages * kW4StageK + group * 128 + s * 32 + h * 16 + thread % 4 * 4;
  const auto code = [&](int64_t r, int64_t c) -> int {
    const int nibble = codes[r * (k / 2) + c / 2] >> (c % 2 * 4) & 0xf;
    return nibble >= 8 ? nibble - 16 : nibble;
  };
  const int u = code(row, column + b);
  const int v = code(row + 1, column + b);
  const int before = code(row + 1, column + (b + 3) % 4);
  to[stage * kW4StageBytes + in_stage] =
      static_cast<uint8_t>((u < 0 ? 0x80 : 0) | abs(v) << 4 | (before < 0 ? 0x08 : 0) | abs(u));
}

__global__ void arrange_scales(const bf16* scales, int64_t n, int64_t k, std::byte* to) {
  const int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t groups = k / 128;
  if (at >= n * groups) return;
  *reinterpret_cast<bf16*>(to + w4_scale_place(at / groups, at % groups, k)) =
      round_bf16(f32(scales[at]) * 512.0f);
}

template <int TOKENS>
void launch(const GemmArgs& a, const Context& c) {
  static_assert(sizeof(Shared<TOKENS>) <= size_t{227} << 10);
  static const int sms = [] {
    int count = 0;
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0);
    allow_shared(sm90_w4afp8_kernel<TOKENS>, sizeof(Shared<TOKENS>));
    return count;
  }();
  SORTIE_LAUNCH(sm90_w4afp8_kernel<TOKENS>, static_cast<unsigned>(sms), kThreads,
                sizeof(Shared<TOKENS>), c, a);
}

}  // namespace

void w4_arrange(const quant::Matrix& plain, std::byte* to, void* stream) {
  constexpr int kBlock = 256;
  const auto blocks = [](int64_t n) { return static_cast<unsigned>((n + kBlock - 1) / kBlock); };
  const auto on = static_cast<cudaStream_t>(stream);
  arrange_codes<<<blocks(plain.n * plain.k / 2), kBlock, 0, on>>>(
      reinterpret_cast<const uint8_t*>(plain.codes), plain.n, plain.k,
      reinterpret_cast<uint8_t*>(to));
  note_launch("arrange_codes");
  arrange_scales<<<blocks(plain.n * plain.k / 128), kBlock, 0, on>>>(plain.bf16_scales(), plain.n,
                                                                     plain.k, to);
  note_launch("arrange_scales");
}

void sm90_w4afp8_grouped_gemm(const GemmArgs& a, const Context& c) {
  CHECK(w4_fits(a.n, a.k) && a.groups <= kMostExperts && a.offsets != nullptr &&
        a.x_row_bytes % 16 == 0 && a.y_stride % 2 == 0);
  switch (w4_tokens(a.rows)) {
    case 16:
      return launch<16>(a, c);
    case 32:
      return launch<32>(a, c);
    default:
      return launch<64>(a, c);
  }
}

}  // namespace sortie::cuda
