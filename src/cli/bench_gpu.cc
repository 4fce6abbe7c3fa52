#include "cli/bench_gpu.h"

#include <fmt/format.h>

#include <iostream>
#include <nlohmann/json.hpp>

#if SORTIE_HAS_CUDA
#include "backends/cuda/bench.h"
#include "backends/cuda/cuda.h"
#endif

namespace sortie::cli {

#if SORTIE_HAS_CUDA

namespace {

constexpr quant::Format kFormats[] = {quant::Format::kBf16, quant::Format::kFp8Block,
                                      quant::Format::kW4Afp8, quant::Format::kW8A8Int8};

nlohmann::json report(const cuda::GemmBench& b, int gemm, const cuda::GemmTime& t) {
  const double flops = 2.0 * static_cast<double>(b.experts * b.rows * b.parts * b.n * b.k);
  return {{"op", fmt::format("grouped_gemm_{}", gemm)},
          {"format", quant::format_name(b.format)},
          {"experts", b.experts},
          {"rows", b.rows},
          {"n", b.parts * b.n},
          {"k", b.k},
          {"fused", t.fused},
          {"us", t.us},
          {"gbs", static_cast<double>(t.moved) / t.us * 1e-3},
          {"read_us", t.read_us},
          {"read_percent", 100 * t.read_us / t.us},
          {"tflops", flops / t.us * 1e-6}};
}

void print_line(const nlohmann::json& r) {
  std::cout << fmt::format(
                   "{:<15} {:<10} {:>3} x {:>3} rows  {:>5} -> {:<5} {:>8.1f} us {:>7.0f} GB/s "
                   "{:>5.1f} % of reading {:>7.1f} TFLOPS",
                   r["op"].get<std::string>(), r["format"].get<std::string>(),
                   r["experts"].get<int>(), r["rows"].get<int64_t>(), r["k"].get<int64_t>(),
                   r["n"].get<int64_t>(), r["us"].get<double>(), r["gbs"].get<double>(),
                   r["read_percent"].get<double>(), r["tflops"].get<double>())
            << std::endl;
}

}  // namespace

Status bench_op_gpu(const BenchOpOptions& o) {
  RETURN_IF_ERROR(cuda::available());
  nlohmann::json all = {{"device", cuda::describe_device()}, {"results", nlohmann::json::array()}};
  if (!o.json) std::cout << cuda::describe_device() << std::endl;
  for (const std::string& name : o.formats) {
    ASSIGN_OR_RETURN(const quant::Format format, parse_format(name, kFormats));
    for (const int64_t hidden : o.hidden) {
      const int64_t inner = hidden == 2048 ? 1408 : 2048;
      for (const int64_t rows : o.rows) {
        for (const int gemm : {1, 2}) {
          const cuda::GemmBench b{.format = format,
                                  .experts = o.experts,
                                  .rows = rows,
                                  .n = gemm == 1 ? inner : hidden,
                                  .k = gemm == 1 ? hidden : inner,
                                  .parts = gemm == 1 ? 2 : 1};
          ASSIGN_OR_RETURN(const cuda::GemmTime time, cuda::bench_grouped_gemm(b));
          all["results"].push_back(report(b, gemm, time));
          if (!o.json) print_line(all["results"].back());
        }
      }
    }
  }
  if (o.json) std::cout << all.dump() << std::endl;
  return Status::ok();
}

#else

Status bench_op_gpu(const BenchOpOptions& /*options*/) {
  return Status::usage("--device cuda is not in this build (no nvcc was found): take cpu");
}

#endif

}  // namespace sortie::cli
