// w4afp8 on WGMMA (docs/kernels/w4afp8_grouped_gemm.md): int4 widened to e4m3 in registers, 4
// WGMMAs of k = 32 from zero for each group of 128, then acc = fma(group sum, group scale, acc),
// groups ascending. While one tile's products run, the other tile's codes are widened.
#include "backends/cuda/sm90_gemm.cuh"

namespace sortie::cuda {

namespace {

// 64 rows of a tile as a thread of their warpgroup reads them out of shared memory.
struct Codes {
  uint4 vectors[2];
  uint32_t scales;  // two bf16

  __device__ __forceinline__ void load(const std::byte* tile, int half, int thread, int row) {
    const auto* from = reinterpret_cast<const uint4*>(tile) + half * 256 + thread;
    vectors[0] = from[0];
    vectors[1] = from[128];
    scales = *reinterpret_cast<const uint32_t*>(tile + kW4CodeBytes + row * 2);
  }
};

// And as the tensor cores take them.
struct Operand {
  uint32_t codes[4][4];  // e4m3, k = 32 each
  uint32_t scales;

  __device__ __forceinline__ void widen(const Codes& c, bool minus_eight) {
    const uint32_t words[4][2] = {{c.vectors[0].x, c.vectors[0].y},
                                  {c.vectors[0].z, c.vectors[0].w},
                                  {c.vectors[1].x, c.vectors[1].y},
                                  {c.vectors[1].z, c.vectors[1].w}};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t word = words[step][h];
        codes[step][2 * h] = word & 0x87878787u;
        codes[step][2 * h + 1] = __funnelshift_r(word, word, 4) & 0x87878787u;
      }
    }
    if (minus_eight) {
#pragma unroll
      for (int i = 0; i < 16; ++i) codes[i / 4][i % 4] = with_minus_eight(codes[i / 4][i % 4]);
    }
    scales = c.scales;
  }

  // -0 stands for -8: 0x80 becomes 0x88 in each byte.
  static __device__ __forceinline__ uint32_t with_minus_eight(uint32_t v) {
    const uint32_t has_magnitude = (v & 0x07070707u) + 0x07070707u;  // bit 3
    return v | (v >> 4 & ~has_magnitude & 0x08080808u);
  }
};

struct W4Tiles {
  static constexpr int kTileBytes = kW4TileBytes;
  static constexpr int kTailBytes = kW4TailBytes;
  using Shared = Sm90Shared<kTileBytes>;

  // Whether a code is -8.
  static __device__ __forceinline__ int flags(const Item& item) {
    return *reinterpret_cast<const int*>(item.tails[0]) |
           *reinterpret_cast<const int*>(item.tails[1]);
  }

  template <Out OUT, int N>
  static __device__ __forceinline__ void multiply(const GemmArgs& a, Shared& s,
                                                  Ring<Shared::kStages>& ring, const Item& item,
                                                  int& turn) {
    const int thread = static_cast<int>(threadIdx.x) % 128;
    const int half = static_cast<int>(threadIdx.x) / 128 - 1;
    const int lane = thread % kWarp;
    const int row = half * 64 + thread / kWarp * 16 + lane / 4 * 2;  // u; v is the next one
    float acc[2][N / 2] = {};
    float part[2][N / 2];
    Operand w[2];
    const bool minus_eight = item.flags != 0;
    TokenScales scales;
    scales.load(a, item);
    Codes codes[2];
    const auto load = [&] {
      ptx::barrier_wait(&s.full[ring.stage], ring.parity);
      codes[0].load(s.tiles[ring.stage][0], half, thread, row);
      codes[1].load(s.tiles[ring.stage][1], half, thread, row);
    };
    const auto start = [&](const Operand& from, float(&sums)[N / 2]) {
      const uint64_t tokens = ptx::swizzled_tile(s.tokens[ring.stage]);
      ptx::settle(sums);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        ptx::wgmma_e4m3(sums, from.codes[step], tokens + 2 * step, step > 0 ? 1 : 0);
      }
      ptx::wgmma_commit();
    };
    const auto fold = [&](float(&sums)[N / 2], uint32_t scales, float(&to)[N / 2]) {
      ptx::settle(sums);
      const float u = __uint_as_float(scales << 16);
      const float v = __uint_as_float(scales & 0xffff0000u);
#pragma unroll
      for (int j = 0; j < N / 2; ++j) to[j] = fmaf(sums[j], j % 4 < 2 ? u : v, to[j]);
    };

    const int stages_of_k = a.k / kTileK;
    load();
    w[0].widen(codes[0], minus_eight);
#pragma unroll 1
    for (int k = 1; k <= stages_of_k; ++k) {
      start(w[0], part[0]);
      w[1].widen(codes[1], minus_eight);
      start(w[1], part[1]);
      const int stage = ring.stage;
      ring.advance();
      if (k < stages_of_k) load();
      ptx::wgmma_wait<1>();
      fold(part[0], w[0].scales, acc[0]);
      w[0].widen(codes[0], minus_eight);
      ptx::wgmma_wait<0>();
      fold(part[1], w[1].scales, acc[1]);
      __syncwarp();
      if (lane == 0) ptx::barrier_arrive(&s.empty[stage]);
    }

    store<OUT, N>(a, item, acc, scales, s.staged[half], turn,
                  [](float sum, int, int, float scale) { return sum * scale; });
  }
};

// A block packs a tile.
__global__ void __launch_bounds__(256)
    pack_w4(const uint8_t* codes, const bf16* scales, int64_t n, int64_t k, std::byte* to) {
  const int64_t groups = k / kTileK;
  const int64_t first_row = blockIdx.x / groups * kTileRows;
  const int64_t group = blockIdx.x % groups;
  std::byte* tile = to + int64_t{blockIdx.x} * kW4TileBytes;
  const auto code = [&](int64_t row, int64_t column) -> int {
    const int64_t at = (first_row + row) * (k / 2) + (group * kTileK + column) / 2;
    const int nibble = codes[at] >> (column % 2 * 4) & 0xf;
    return nibble >= 8 ? nibble - 16 : nibble;
  };
  bool any = false;
  for (int at = static_cast<int>(threadIdx.x); at < kW4CodeBytes; at += 256) {
    // The inverse of w4_place for the two codes whose magnitudes share a byte.
    const int b = at % 4;
    const int word = at / 4 % 4;
    const int thread = at / 16 % 128;
    const int vector = at / 2048;  // (half, s / 2)
    const int row = vector / 2 * 64 + thread / 32 * 16 + thread % 32 / 4 * 2;
    const int column = (vector % 2 * 2 + word / 2) * 32 + word % 2 * 16 + thread % 4 * 4;
    const int u = code(row, column + b);
    const int v = code(row + 1, column + b);
    const int before = code(row + 1, column + (b + 3) % 4);
    any = any || u == -8 || v == -8;
    tile[at] = static_cast<std::byte>((u < 0 ? 0x80 : 0) | (abs(v) & 7) << 4 |
                                      (before < 0 ? 0x08 : 0) | (abs(u) & 7));
  }
  if (any) {
    atomicOr(
        reinterpret_cast<int*>(to + all_tiles_bytes(n, k, kW4TileBytes)) + first_row / kTileRows,
        1);
  }
  if (threadIdx.x < kTileRows) {
    const bf16 scale = scales[(first_row + threadIdx.x) * groups + group];
    reinterpret_cast<bf16*>(tile + kW4CodeBytes)[threadIdx.x] = round_bf16(f32(scale) * 512.0f);
  }
}

}  // namespace

void pack_w4afp8(const quant::Matrix& rows, std::byte* to, void* stream) {
  const auto tiles = static_cast<unsigned>(rows.n / kTileRows * (rows.k / kTileK));
  const int64_t tail = all_tiles_bytes(rows.n, rows.k, kW4TileBytes);
  cudaMemsetAsync(to + tail, 0, static_cast<size_t>(packed_bytes(rows) - tail),
                  static_cast<cudaStream_t>(stream));
  pack_w4<<<tiles, 256, 0, static_cast<cudaStream_t>(stream)>>>(
      reinterpret_cast<const uint8_t*>(rows.codes), rows.bf16_scales(), rows.n, rows.k, to);
  note_launch("pack_w4");
}

void sm90_w4afp8(const GemmArgs& a, const Context& c) { launch_sm90<W4Tiles>(a, c); }

}  // namespace sortie::cuda
