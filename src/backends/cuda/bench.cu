#include <algorithm>
#include <string>
#include <vector>

#include "backends/cuda/bench.h"
#include "backends/cuda/cuda.h"
#include "backends/cuda/kernel.cuh"
#include "quant/matrix_ops.h"

namespace sortie::cuda {

namespace {

constexpr int kCalls = 12;    // of a graph
constexpr int kReplays = 15;  // that are timed, after 3 that are not
constexpr int64_t kPool = int64_t{1} << 30;

__device__ uint64_t scramble(uint64_t x) {  // splitmix64
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// Random codes that are ordinary numbers: no NaN in e4m3 or bf16, no -8 in int4.
__global__ void fill_codes(uint64_t* words, int64_t count, quant::Format format, uint64_t seed) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  uint64_t v = scramble(seed + static_cast<uint64_t>(i));
  if (format == quant::Format::kBf16) v = (v & 0x8077807780778077u) | 0x3c003c003c003c00u;
  if (format == quant::Format::kFp8Block) v &= 0xbfbfbfbfbfbfbfbfu;
  if (format == quant::Format::kW4Afp8) {
    for (int n = 0; n < 64; n += 4) {
      if ((v >> n & 0xf) == 8) v ^= uint64_t{1} << n;
    }
  }
  words[i] = v;
}

template <typename T>
__global__ void fill(T* to, int64_t count, T value) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) to[i] = value;
}

// Reads everything; `sink` only keeps the loads alive.
__global__ void __launch_bounds__(512) read_all(const uint4* from, int64_t count, uint32_t* sink) {
  uint32_t sum = 0;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (; i + 7 * step < count; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = __ldcs(from + i + j * step);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  for (; i < count; i += step) {
    const uint4 v = __ldcs(from + i);
    sum ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  if (sum == 0x12345678u) *sink = sum;
}

unsigned blocks_of(int64_t n, int block) { return static_cast<unsigned>((n + block - 1) / block); }

// The median of replays of a graph of kCalls calls, in us a call.
template <typename Call>
double time_calls(cudaStream_t stream, const Call& call) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
  for (int i = 0; i < kCalls; ++i) call(i);
  cudaStreamEndCapture(stream, &graph);
  cudaGraphInstantiate(&exec, graph, 0);
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  std::vector<float> times;
  for (int i = 0; i < 3 + kReplays; ++i) {
    cudaEventRecord(begin, stream);
    cudaGraphLaunch(exec, stream);
    cudaEventRecord(end, stream);
    cudaEventSynchronize(end);
    float ms = 0;
    cudaEventElapsedTime(&ms, begin, end);
    if (i >= 3) times.push_back(ms);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  std::nth_element(times.begin(), times.begin() + kReplays / 2, times.end());
  return times[kReplays / 2] * 1e3 / kCalls;
}

}  // namespace

Result<GemmTime> bench_grouped_gemm(const GemmBench& b) {
  RETURN_IF_ERROR(available());
  const ops::Device& device = *backend().device;
  auto* stream = static_cast<cudaStream_t>(device.stream());
  ThreadPool pool(1);
  Arena arena(&device.memory);
  const ops::Context context{pool, arena, stream};
  constexpr int kBlock = 256;

  const int matrices = b.experts * b.parts;
  const int64_t code_bytes = quant::ceil_div(quant::code_bytes(b.format, b.n, b.k), 256) * 256;
  const int64_t scale_bytes = quant::ceil_div(quant::scale_bytes(b.format, b.n, b.k), 256) * 256;
  std::vector<quant::Matrix> w(static_cast<size_t>(matrices),
                               {.format = b.format, .n = b.n, .k = b.k});
  const int64_t packed_bytes = quant::ceil_div(device.packed_bytes(w[0]), 256) * 256;
  const bool packed = packed_bytes > 0;
  const int64_t matrix_bytes = packed ? packed_bytes : code_bytes;
  const int64_t set_bytes = (packed ? packed_bytes : code_bytes + scale_bytes) * matrices;
  const auto sets = static_cast<int>(std::clamp<int64_t>(quant::ceil_div(kPool, set_bytes), 2, 12));

  const auto filled = [&](int64_t bytes, uint64_t seed) {
    std::byte* p = arena.alloc_bytes(static_cast<size_t>(bytes));
    fill_codes<<<blocks_of(bytes / 8, kBlock), kBlock, 0, stream>>>(reinterpret_cast<uint64_t*>(p),
                                                                    bytes / 8, b.format, seed);
    return p;
  };
  const auto scaled = [&](int64_t bytes) {
    std::byte* p = arena.alloc_bytes(static_cast<size_t>(std::max<int64_t>(bytes, 256)));
    if (b.format == quant::Format::kW4Afp8) {
      fill<<<blocks_of(bytes / 2, kBlock), kBlock, 0, stream>>>(reinterpret_cast<bf16*>(p),
                                                                bytes / 2, to_bf16(0.01f));
    } else if (bytes > 0) {
      fill<<<blocks_of(bytes / 4, kBlock), kBlock, 0, stream>>>(reinterpret_cast<float*>(p),
                                                                bytes / 4, 0.01f);
    }
    return p;
  };
  std::vector<std::byte*> codes;
  std::vector<std::byte*> scales;
  for (int s = 0; s < sets; ++s) {
    if (!packed) {
      codes.push_back(filled(code_bytes * matrices, static_cast<uint64_t>(s) << 40));
      scales.push_back(scaled(scale_bytes * matrices));
      continue;
    }
    codes.push_back(arena.alloc_bytes(static_cast<size_t>(set_bytes)));
    scales.push_back(nullptr);
    const Arena::Scope scope(arena);
    for (int m = 0; m < matrices; ++m) {
      const Arena::Scope matrix(arena);
      quant::Matrix plain = w[0];
      plain.codes = filled(code_bytes, static_cast<uint64_t>(s * matrices + m) << 32);
      plain.scales = scaled(scale_bytes);
      device.pack(plain, codes.back() + m * packed_bytes, stream);
    }
  }

  const int64_t entries = b.experts * b.rows;
  quant::Rows x{.format = quant::act_format(b.format, b.format == quant::Format::kW4Afp8),
                .count = entries,
                .k = b.k};
  if (x.format == quant::ActFormat::kF32) x.format = quant::ActFormat::kBf16;
  if (x.format == quant::ActFormat::kE4m3Static) x.static_scale = 0.01f;
  auto* plain_rows = arena.alloc<bf16>(entries * b.k);
  fill_codes<<<blocks_of(entries * b.k / 4, kBlock), kBlock, 0, stream>>>(
      reinterpret_cast<uint64_t*>(plain_rows), entries * b.k / 4, quant::Format::kBf16, 7);
  x.data = arena.alloc_bytes(static_cast<size_t>(entries * x.row_bytes()));
  backend().quantise({plain_rows, b.k, x}, context);
  std::vector<int32_t> offsets;
  std::vector<int32_t> index;
  for (int e = 0; e <= b.experts; ++e) offsets.push_back(static_cast<int32_t>(e * b.rows));
  for (int64_t i = 0; i < entries; ++i) {
    index.push_back(static_cast<int32_t>(i * 7919 % entries));
  }
  auto* device_offsets = arena.alloc<int32_t>(b.experts + 1);
  auto* device_index = arena.alloc<int32_t>(entries);
  device.upload(device_offsets, offsets.data(), offsets.size() * 4, stream);
  device.upload(device_index, index.data(), index.size() * 4, stream);
  const int64_t results = entries * b.parts * b.n;
  auto* out = arena.alloc<float>(results);
  quant::Rows h{.format = x.format, .count = entries, .k = b.n, .static_scale = x.static_scale};
  h.data = arena.alloc_bytes(static_cast<size_t>(entries * h.row_bytes()));
  RETURN_IF_ERROR(device.finish(stream));

  bool fused = false;
  const auto call = [&](int i) {
    const auto set = static_cast<size_t>(i % sets);
    for (int m = 0; m < matrices; ++m) {
      quant::Matrix& matrix = w[static_cast<size_t>(m)];
      matrix.layout = packed ? quant::Layout::kTiles : quant::Layout::kRows;
      matrix.input_scale = x.static_scale;
      matrix.codes = codes[set] + m * matrix_bytes;
      matrix.scales = packed ? nullptr : scales[set] + m * scale_bytes;
    }
    if (b.parts == 1) {
      backend().grouped_gemm(
          {x, device_index, device_offsets, b.experts, w.data(), 1, reinterpret_cast<bf16*>(out)},
          context);
      return;
    }
    fused = backend().grouped_swiglu({x, device_index, device_offsets, b.experts, w.data(), h},
                                     context);
    if (fused) return;
    backend().grouped_gemm_f32({x, device_index, device_offsets, b.experts, w.data(), 2, out},
                               context);
  };
  auto* sink = arena.alloc<uint32_t>(1);
  // The best of three grids: what memory can do, not what one launch happens to.
  const auto read = [&](unsigned blocks) {
    return time_calls(stream, [&](int i) {
      read_all<<<blocks, 512, 0, stream>>>(
          reinterpret_cast<const uint4*>(codes[static_cast<size_t>(i % sets)]),
          matrix_bytes * matrices / 16, sink);
    });
  };
  GemmTime time;
  call(0);  // what a first call sets up
  RETURN_IF_ERROR(device.finish(stream));
  time.us = time_calls(stream, call);
  time.fused = fused;
  time.bytes = matrices * w[0].bytes();
  time.read_us = std::min({read(132), read(264), read(528)}) * static_cast<double>(time.bytes) /
                 static_cast<double>(matrix_bytes * matrices);
  const int64_t result_bytes = b.parts == 1 ? results * 2 : fused ? results / 2 : results * 4;
  time.moved = time.bytes + entries * x.row_bytes() + result_bytes;
  RETURN_IF_ERROR(device.finish(stream));
  cudaStreamDestroy(stream);
  return time;
}

}  // namespace sortie::cuda
