// w8a8_int8 on WGMMA: int8 tiles lie in shared memory as the tensor cores read them, int32 sums
// stay in registers from the first k to the last, so they are exact in any order.
#include "backends/cuda/sm90_gemm.cuh"

namespace sortie::cuda {

namespace {

struct Int8Tiles {
  static constexpr int kTileBytes = kInt8TileBytes;
  static constexpr int kTailBytes = kInt8TailBytes;
  using Shared = Sm90Shared<kTileBytes>;
  static_assert(offsetof(Shared, tiles) % 1024 == 0);

  static __device__ __forceinline__ int flags(const Item& /*item*/) { return 0; }

  template <Out OUT, int N>
  static __device__ __forceinline__ void multiply(const GemmArgs& a, Shared& s,
                                                  Ring<Shared::kStages>& ring, const Item& item,
                                                  int& turn) {
    const int thread = static_cast<int>(threadIdx.x) % 128;
    const int half = static_cast<int>(threadIdx.x) / 128 - 1;
    const int lane = thread % kWarp;
    const int row = half * 64 + thread / kWarp * 16 + lane / 4 * 2;  // u; v is the next one
    int acc[2][N / 2] = {};
    TokenScales scales;
    scales.load(a, item);
    const float2 row_scales[2] = {reinterpret_cast<const float2*>(item.tails[0])[row / 2],
                                  reinterpret_cast<const float2*>(item.tails[1])[row / 2]};
    int before = ring.stage;  // whose products may still run
    for (int k = 0; k < a.k / kTileK; ++k) {
      ptx::barrier_wait(&s.full[ring.stage], ring.parity);
      const uint64_t tokens = ptx::swizzled_tile(s.tokens[ring.stage]);
      const uint64_t weights[2] = {
          ptx::swizzled_tile(s.tiles[ring.stage][0] + half * (kTileBytes / 2)),
          ptx::swizzled_tile(s.tiles[ring.stage][1] + half * (kTileBytes / 2))};
      ptx::settle(acc[0]);
      ptx::settle(acc[1]);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          ptx::wgmma_int8(acc[tile], weights[tile] + 2 * step, tokens + 2 * step);
        }
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      if (lane == 0 && k > 0) ptx::barrier_arrive(&s.empty[before]);
      before = ring.stage;
      ring.advance();
    }
    ptx::wgmma_wait<0>();
    ptx::settle(acc[0]);
    ptx::settle(acc[1]);
    if (lane == 0) ptx::barrier_arrive(&s.empty[before]);

    store<OUT, N>(a, item, acc, scales, s.staged[half], turn,
                  [&](int sum, int tile, int v, float scale) {
                    return (static_cast<float>(sum) * scale) *
                           (v == 0 ? row_scales[tile].x : row_scales[tile].y);
                  });
  }
};

// A thread moves 16 codes.
__global__ void __launch_bounds__(256)
    pack_int8(const std::byte* codes, const float* scales, int64_t n, int64_t k, std::byte* to) {
  const int64_t at = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (at < n * k / 16) {
    const int64_t row = at / (k / 16);
    const int64_t column = at % (k / 16) * 16;
    *reinterpret_cast<uint4*>(to + int8_place(row, column, k)) =
        *reinterpret_cast<const uint4*>(codes + row * k + column);
  }
  if (at < n) reinterpret_cast<float*>(to + n * k)[at] = scales[at];
}

}  // namespace

void pack_w8a8_int8(const quant::Matrix& rows, std::byte* to, void* stream) {
  const auto blocks = static_cast<unsigned>((rows.n * rows.k / 16 + 255) / 256);
  pack_int8<<<blocks, 256, 0, static_cast<cudaStream_t>(stream)>>>(rows.codes, rows.f32_scales(),
                                                                   rows.n, rows.k, to);
  note_launch("pack_int8");
}

void sm90_w8a8_int8(const GemmArgs& a, const Context& c) { launch_sm90<Int8Tiles>(a, c); }

}  // namespace sortie::cuda
