#pragma once

#include "backends/cuda/kernel.cuh"
#include "backends/cuda/ptx_sm90.cuh"
#include "backends/cuda/quantise.cuh"
#include "backends/cuda/sm90_tiles.h"

// The grouped GEMM on WGMMA: packed weights stream through shared memory once, tokens are gathered
// by the lists. A format adds how tiles become products.
//
//   block      persistent, one an SM; work items (expert, pair of tiles of W, up to 64 tokens)
//   warp 0     one lane copies the two tiles of a stage (128 of K) by bulk copies
//   warps 1, 2 gather the tokens' 128 bytes a stage by cp.async, swizzled for WGMMA
//   warps 4-11 two warpgroups, each with 64 rows of both tiles; weights are WGMMA's M side, so few
//              tokens waste little: N is 16, 32 or 64, which changes no bits
//
// A result's order of sums is K ascending, whatever the lists are.
namespace sortie::cuda {

constexpr int kSm90Threads = 384;
constexpr int kTokenWarps = 2;
constexpr int kConsumerWarps = 8;
constexpr int kStagedBytes = 2 * 8 * (64 * 4 + 16);  // 64 rows of two tiles, 8 tokens
constexpr int kTokenLag = 3;                         // stages whose tokens are on their way

struct Item {
  const std::byte* tiles[2];  // of K = 0; the second may be null
  const std::byte* tails[2];  // theirs, of what stands behind the matrix's tiles
  int64_t columns[2];         // of the results: the tiles' first
  int begin;                  // first entry
  int count;
  int flags;  // the format's own
};

// The work items of a call, known when the lists are.
struct Items {
  const int* offsets;  // in shared memory, as `first`: [groups] items before an expert's
  const int* first;
  int pairs;
  int tail_bytes;          // of a tile's rows, behind the matrix's tiles
  int64_t tile_row_bytes;  // from a tile to the one below

  __device__ Item at(const GemmArgs& a, int item) const {
    int low = 0;
    int high = a.groups;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (first[middle] <= item ? low : high) = middle;
    }
    const int rows = offsets[low + 1] - offsets[low];
    const int tiles = (rows + kTokensOfBlock - 1) / kTokensOfBlock;
    const int rest = item - first[low];
    const int pair = rest / tiles;  // tokens innermost: neighbours share the weights
    const int tile = rest - pair * tiles;
    Item i;
    i.begin = offsets[low] + tile * kTokensOfBlock;
    i.count = min(kTokensOfBlock, rows - tile * kTokensOfBlock);
    const std::byte* w = a.w + int64_t{low} * a.parts * a.w_bytes;
    const int row_tiles = a.n / kTileRows;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const int row_tile = a.parts == 2 ? pair : min(2 * pair + t, row_tiles - 1);
      const std::byte* matrix = a.parts == 2 ? w + t * a.w_bytes : w;
      i.tiles[t] = matrix + row_tile * tile_row_bytes;
      i.tails[t] = matrix + row_tiles * tile_row_bytes + row_tile * tail_bytes;
      i.columns[t] = int64_t{row_tile} * kTileRows + (a.parts == 2 ? t * a.n : 0);
    }
    if (i.tiles[1] == i.tiles[0]) i.tiles[1] = nullptr;
    return i;
  }
};

// One warp fills offsets and first, [0 .. groups].
__device__ inline void count_items(const GemmArgs& a, int pairs, int* offsets, int* first) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int e = lane; e <= a.groups; e += kWarp) offsets[e] = a.offsets[e];
  __syncwarp();
  const int each = (a.groups + kWarp - 1) / kWarp;
  const int begin = min(lane * each, a.groups);
  const int end = min(begin + each, a.groups);
  const auto items_of = [&](int e) {
    return (offsets[e + 1] - offsets[e] + kTokensOfBlock - 1) / kTokensOfBlock * pairs;
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

template <int TILE_BYTES>
struct Sm90Shared {
  static constexpr int kStages = stages(TILE_BYTES);
  std::byte tokens[kStages][kTokensOfBlock * kTileK];  // rows of 128 bytes, swizzled
  std::byte tiles[kStages][2][TILE_BYTES];
  Item items[kStages];                   // with an item's first stage
  std::byte staged[2][2][kStagedBytes];  // results: by warpgroup, two in turn
  uint64_t full[kStages];
  uint64_t empty[kStages];
  int offsets[kMostExperts + 1];
  int first[kMostExperts + 1];
};

// A position in the ring of stages.
template <int STAGES>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The consumers learn from here what they work on.
template <typename F>
__device__ void load_tiles(const GemmArgs& a, Sm90Shared<F::kTileBytes>& s, const Items& items) {
  constexpr int kBytes = F::kTileBytes;
  Ring<Sm90Shared<kBytes>::kStages> ring;
  const int total = items.first[a.groups];
  for (int i = static_cast<int>(blockIdx.x); i < total; i += static_cast<int>(gridDim.x)) {
    Item item = items.at(a, i);
    item.flags = F::flags(item);
    const bool both = item.tiles[1] != nullptr;
#pragma unroll 1
    for (int k = 0; k < a.k / kTileK; ++k) {
      uint64_t* full = &s.full[ring.stage];
      ptx::barrier_wait(&s.empty[ring.stage], ring.parity ^ 1);
      if (k == 0) s.items[ring.stage] = item;
      ptx::barrier_arrive_expecting(full, (both ? 2 : 1) * kBytes);
      const int64_t at = int64_t{k} * kBytes;
      ptx::bulk_load(s.tiles[ring.stage][0], item.tiles[0] + at, kBytes, full);
      if (both) ptx::bulk_load(s.tiles[ring.stage][1], item.tiles[1] + at, kBytes, full);
      ring.advance();
    }
  }
}

template <int TILE_BYTES>
__device__ void load_tokens(const GemmArgs& a, Sm90Shared<TILE_BYTES>& s, const Items& items) {
  constexpr int kStages = Sm90Shared<TILE_BYTES>::kStages;
  static_assert(kStages > kTokenLag);
  constexpr int kPieces = kTileK / 16;                        // of a row in a stage
  constexpr int kRowsAtOnce = kTokenWarps * kWarp / kPieces;  // of all these warps
  constexpr int kCopies = kTokensOfBlock / kRowsAtOnce;       // of a thread, each stage
  const int thread = static_cast<int>(threadIdx.x) - kWarp;
  const int lane = thread % kWarp;
  const int piece = thread % kPieces;
  const int first_token = thread / kPieces;
  const int total = items.first[a.groups];
  Ring<kStages> ring;
  Ring<kStages> done;  // stages whose tokens have arrived
  int pending = 0;
  const auto finish_one = [&] {
    ptx::fence_async_proxy();
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(&s.full[done.stage]);
    done.advance();
    --pending;
  };
  for (int i = static_cast<int>(blockIdx.x); i < total; i += static_cast<int>(gridDim.x)) {
    const Item item = items.at(a, i);
    const std::byte* rows[kCopies];
#pragma unroll
    for (int r = 0; r < kCopies; ++r) {
      const int entry = item.begin + min(r * kRowsAtOnce + first_token, item.count - 1);
      const int64_t row = a.row_index == nullptr ? entry : a.row_index[entry];
      rows[r] = a.x + row * a.x_row_bytes + piece * 16;
    }
#pragma unroll 1
    for (int k = 0; k < a.k / kTileK; ++k) {
      ptx::barrier_wait(&s.empty[ring.stage], ring.parity ^ 1);
      const uint32_t to = ptx::shared_address(s.tokens[ring.stage]);
#pragma unroll
      for (int r = 0; r < kCopies; ++r) {
        const int token = r * kRowsAtOnce + first_token;
        if (token < item.count) {
          ptx::copy_async(to + static_cast<uint32_t>(token * kTileK + (piece ^ token % 8) * 16),
                          rows[r] + k * kTileK);
        }
      }
      ptx::copy_commit();
      ring.advance();
      if (++pending > kTokenLag) {
        ptx::copy_wait<kTokenLag>();
        finish_one();
      }
    }
  }
  ptx::copy_wait<0>();
  while (pending > 0) finish_one();
}

// Where results go.
enum class Out : uint8_t { kF32, kBf16, kSwiglu };

template <Out OUT>
struct Results {
  static constexpr int kBytes = OUT == Out::kF32 ? 4 : OUT == Out::kBf16 ? 2 : 1;  // of one
  static constexpr int kTiles = OUT == Out::kSwiglu ? 1 : 2;
  static constexpr int kPieces = 64 * kBytes / 16;    // of a warpgroup's rows of a tile
  static constexpr int kPitch = 64 * kBytes + 16;     // lanes of a warp meet different banks
  static constexpr int kSpace = kTiles * 8 * kPitch;  // of eight tokens
  static_assert(kSpace <= kStagedBytes);

  // Rows u and u + 1 of both tiles.
  static __device__ __forceinline__ void put(std::byte* to, const float (&y)[2][2], float scale) {
    if constexpr (OUT == Out::kSwiglu) {
      const uint32_t low = e4m3_code(quotient(swiglu(y[0][0], y[1][0]), scale));
      const uint32_t high = e4m3_code(quotient(swiglu(y[0][1], y[1][1]), scale));
      *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(low | high << 8);
    } else {
#pragma unroll
      for (int tile = 0; tile < 2; ++tile, to += 8 * kPitch) {
        if constexpr (OUT == Out::kF32) {
          *reinterpret_cast<float2*>(to) = make_float2(y[tile][0], y[tile][1]);
        } else {
          *reinterpret_cast<uint32_t*>(to) =
              round_bf16(y[tile][0]).bits | uint32_t{round_bf16(y[tile][1]).bits} << 16;
        }
      }
    }
  }
  static __device__ __forceinline__ std::byte* row(const GemmArgs& a, int64_t entry) {
    if constexpr (OUT == Out::kSwiglu) {
      return reinterpret_cast<std::byte*>(a.y8 + entry * a.y8_row_bytes);
    } else if constexpr (OUT == Out::kBf16) {
      return reinterpret_cast<std::byte*>(a.y16 + entry * a.y_stride);
    } else {
      return reinterpret_cast<std::byte*>(a.y32 + entry * a.y_stride);
    }
  }
};

// The scales of an item's tokens: lane l of a warp has those of tokens l and l + 32. Asked for
// before the products, so that nobody waits for them after.
struct TokenScales {
  float of[2];

  __device__ __forceinline__ void load(const GemmArgs& a, const Item& item) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = i * kWarp + static_cast<int>(threadIdx.x) % kWarp;
      of[i] = a.static_scale;
      if (!a.has_row_scale || token >= item.count) continue;
      const int64_t entry = item.begin + token;
      const int64_t row = a.row_index == nullptr ? entry : a.row_index[entry];
      of[i] = *reinterpret_cast<const float*>(a.x + row * a.x_row_bytes + a.x_scale_offset);
    }
  }
};

// Stores what a warpgroup's threads have: sums of rows u and u + 1 of each tile, of two tokens of
// eight,
//   sums[tile][4 j + 2 v + e]: token 8 j + 2 q + e, row u + v,
// made fp32 by finish(sum, tile, v, the token's scale). Eight tokens at a time pass through
// `staged`, so that whole lines go to memory; the sums are lost, since the next eight tokens' are
// moved to the place of the first: code that names each register is so long that fetching it takes
// longer than running it. `turn` counts the uses of the two halves of `staged`.
template <Out OUT, int N, typename Sum, typename Finish>
__device__ __forceinline__ void store(const GemmArgs& a, const Item& item, Sum (&sums)[2][N / 2],
                                      const TokenScales& scales,
                                      std::byte (&staged)[2][kStagedBytes], int& turn,
                                      const Finish& finish) {
  using R = Results<OUT>;
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const int half = static_cast<int>(threadIdx.x) / 128 - 1;
  const int row = thread / kWarp * 16 + thread % kWarp / 4 * 2;  // u, of the warpgroup's 64
#pragma unroll 1
  for (int first = 0; first < N && first < item.count; first += 8, turn ^= 1) {
    std::byte* const space = staged[turn];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int token = thread % 4 * 2 + e;
      // Which register is asked follows from `first`, the same for the whole warp.
      const float scale =
          __shfl_sync(kAll, first < kWarp ? scales.of[0] : scales.of[1], (first + token) % kWarp);
      float y[2][2];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
        for (int v = 0; v < 2; ++v) y[tile][v] = finish(sums[tile][2 * v + e], tile, v, scale);
      }
      R::put(space + token * R::kPitch + row * R::kBytes, y, a.y8_scale);
    }
    ptx::warpgroup_barrier(1 + half);
    for (int at = thread; at < R::kTiles * 8 * R::kPieces; at += 128) {
      const int piece = at % R::kPieces;
      const int token = at / R::kPieces % 8;
      const int tile = at / R::kPieces / 8;
      if (first + token >= item.count || (tile == 1 && item.tiles[1] == nullptr)) continue;
      const int64_t column = (tile == 0 ? item.columns[0] : item.columns[1]) + half * 64;
      *reinterpret_cast<uint4*>(R::row(a, item.begin + first + token) + column * R::kBytes +
                                piece * 16) =
          *reinterpret_cast<const uint4*>(space + (tile * 8 + token) * R::kPitch + piece * 16);
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int i = 0; i + 4 < N / 2; ++i) sums[tile][i] = sums[tile][i + 4];
    }
  }
}

// F::kTileBytes, F::kTailBytes, F::flags(item), and F::multiply<OUT, N>(args, shared, ring, item),
// which a consumer calls for each item and which leaves the ring behind it.
template <typename F, Out OUT>
__global__ void __launch_bounds__(kSm90Threads, 1)
    sm90_grouped_gemm(const __grid_constant__ GemmArgs a) {
  extern __shared__ __align__(1024) std::byte memory[];
  using Shared = Sm90Shared<F::kTileBytes>;
  auto& s = *reinterpret_cast<Shared*>(memory);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const Items items{s.offsets, s.first, tile_pairs(a.n, a.parts), F::kTailBytes,
                    int64_t{a.k / kTileK} * F::kTileBytes};
  if (warp == 0) {
    count_items(a, items.pairs, s.offsets, s.first);
  } else if (threadIdx.x == kWarp) {
    for (int i = 0; i < Shared::kStages; ++i) {
      ptx::barrier_init(&s.full[i], 1 + kTokenWarps);
      ptx::barrier_init(&s.empty[i], kConsumerWarps);
    }
    ptx::fence_async_proxy();
  }
  __syncthreads();
  if (warp < 4) {
    ptx::give_registers<72>();
    if (threadIdx.x == 0) load_tiles<F>(a, s, items);
    if (warp >= 1 && warp <= kTokenWarps) load_tokens(a, s, items);
    return;
  }
  ptx::take_registers<216>();
  Ring<Shared::kStages> ring;
  int turn = 0;
  const int total = s.first[a.groups];
  for (int i = static_cast<int>(blockIdx.x); i < total; i += static_cast<int>(gridDim.x)) {
    ptx::barrier_wait(&s.full[ring.stage], ring.parity);
    const Item item = s.items[ring.stage];
    switch (token_columns(item.count)) {
      case 16:
        F::template multiply<OUT, 16>(a, s, ring, item, turn);
        break;
      case 32:
        F::template multiply<OUT, 32>(a, s, ring, item, turn);
        break;
      default:
        F::template multiply<OUT, 64>(a, s, ring, item, turn);
        break;
    }
  }
}

template <typename F, Out OUT>
void launch_sm90(const GemmArgs& a, const Context& c) {
  constexpr size_t kShared = sizeof(Sm90Shared<F::kTileBytes>);
  static_assert(kShared <= size_t{227} << 10);
  static const int sms = [] {
    int count = 0;
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0);
    allow_shared(sm90_grouped_gemm<F, OUT>, kShared);
    return count;
  }();
  SORTIE_LAUNCH((sm90_grouped_gemm<F, OUT>), static_cast<unsigned>(sms), kSm90Threads, kShared, c,
                a);
}

template <typename F>
void launch_sm90(const GemmArgs& a, const Context& c) {
  CHECK(a.n % kTileRows == 0 && a.k % kTileK == 0 && a.groups <= kMostExperts &&
        a.offsets != nullptr && a.parts <= 2 && a.x_row_bytes % 16 == 0);
  if (a.y8 != nullptr) return launch_sm90<F, Out::kSwiglu>(a, c);
  if (a.y32 != nullptr) return launch_sm90<F, Out::kF32>(a, c);
  launch_sm90<F, Out::kBf16>(a, c);
}

}  // namespace sortie::cuda
