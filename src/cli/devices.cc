#include "cli/devices.h"

#include <fmt/format.h>

#include "backends/cpu/isa.h"
#if SORTIE_HAS_CUDA
#include "backends/cuda/cuda.h"
#endif
#include "backends/reference/reference.h"

namespace sortie::cli {

Result<Device> choose_device(const std::string& name) {
  if (name == "reference") {
    return Device{.name = reference::backend().name, .host = &reference::backend()};
  }
  if (name == "cpu") {
    ASSIGN_OR_RETURN(const cpu::Isa isa, cpu::choose_isa());
    return Device{.name = cpu::backend(isa).name, .host = &cpu::backend(isa)};
  }
  if (name == "cuda") {
#if SORTIE_HAS_CUDA
    RETURN_IF_ERROR(cuda::available());
    return Device{.name = cuda::backend().name, .gpu = &cuda::backend()};
#else
    return Status::usage("--device cuda is not in this build (no nvcc was found): take cpu");
#endif
  }
  return Status::usage(fmt::format("--device {} is unknown: take cpu, cuda or reference", name));
}

}  // namespace sortie::cli
