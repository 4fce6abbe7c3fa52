// Memory, copies and errors of the device.
#include "backends/cuda/device.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <string>
#include <utility>

#include "backends/cuda/cuda.h"
#include "backends/cuda/sm90_tiles.h"

namespace sortie::cuda {

namespace {

// The first failure since the last finish, on the thread that enqueues.
thread_local std::string first_failure;

void note(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  if (first_failure.empty()) {
    first_failure = fmt::format("the GPU failed in {}: {}", what, cudaGetErrorString(error));
  }
}

std::byte* allocate(size_t bytes) {
  void* p = nullptr;
  if (cudaMalloc(&p, bytes) != cudaSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return static_cast<std::byte*>(p);
}

void release(std::byte* p) { cudaFree(p); }

void* make_stream() {
  cudaStream_t stream = nullptr;
  note(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  return stream;
}

// From pageable memory: staged before the call returns, so the source may be reused.
void upload(void* to, const void* from, size_t bytes, void* stream) {
  if (bytes == 0) return;
  note(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, static_cast<cudaStream_t>(stream)),
       "a copy to the device");
}

void download(void* to, const void* from, size_t bytes, void* stream) {
  if (bytes == 0) return;
  note(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, static_cast<cudaStream_t>(stream)),
       "a copy from the device");
}

Status finish(void* stream) {
  note(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "a step");
  if (first_failure.empty()) return Status::ok();
  return Status::internal(std::exchange(first_failure, {}));
}

}  // namespace

void note_launch(const char* kernel) { note(cudaPeekAtLastError(), kernel); }

const ops::Device& device() {
  static constexpr ops::Device kDevice = {.memory = {allocate, release},
                                          .stream = make_stream,
                                          .upload = upload,
                                          .download = download,
                                          .packed_bytes = packed_bytes,
                                          .pack = pack,
                                          .finish = finish};
  return kDevice;
}

Status available() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    cudaGetLastError();
    return Status::usage(
        fmt::format("--device cuda: no GPU can be used here ({}); take cpu",
                    error != cudaSuccess ? cudaGetErrorString(error) : "none is there"));
  }
  cudaDeviceProp properties{};
  cudaGetDeviceProperties(&properties, 0);
  if (properties.major != 9) {
    return Status::usage(fmt::format(
        "--device cuda: {} is sm_{}{}, and the kernels here are for Hopper (sm_90a); take cpu",
        properties.name, properties.major, properties.minor));
  }
  return Status::ok();
}

std::string describe_device() {
  cudaDeviceProp p{};
  if (cudaGetDeviceProperties(&p, 0) != cudaSuccess) {
    cudaGetLastError();
    return {};
  }
  return fmt::format("{}, {} SMs, {:.1f} GiB", p.name, p.multiProcessorCount,
                     static_cast<double>(p.totalGlobalMem) / 1073741824.0);
}

}  // namespace sortie::cuda
