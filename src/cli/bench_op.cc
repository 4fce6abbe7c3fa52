#include "cli/bench_op.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <nlohmann/json.hpp>

#include "backends/cpu/isa.h"
#include "backends/cpu/probe.h"
#include "base/clock.h"
#include "cli/bench_gpu.h"
#include "quant/activations.h"
#include "quant/matrix_ops.h"

namespace sortie::cli {

namespace {

using quant::Format;

constexpr Format kFormats[] = {Format::kF32, Format::kBf16, Format::kFp8Block, Format::kW4Afp8,
                               Format::kW8A8Int8};

struct Case {
  Format format;
  int gemm;      // 1: gate and up, 2: down
  int64_t rows;  // an expert
  int parts;
  int64_t n;
  int64_t k;

  // As the model would hold it, in the layout that the backend packs.
  quant::Matrix matrix(const ops::Backend& backend) const {
    quant::Matrix m{.format = format, .n = n, .k = k};
    if (backend.pack != nullptr && backend.packed_bytes(m) > 0) m.layout = quant::Layout::kTiles;
    return m;
  }
  int64_t code_bytes(const ops::Backend& backend) const {
    const int64_t packed =
        backend.pack == nullptr ? 0 : backend.packed_bytes({.format = format, .n = n, .k = k});
    return packed > 0 ? packed : quant::code_bytes(format, n, k);
  }
};

// The two GEMMs of an expert whose width follows DeepSeek's: 2048 of 7168, 1408 of 2048.
Case make_case(Format format, int64_t hidden, int gemm, int64_t rows) {
  const int64_t inner = hidden == 2048 ? 1408 : 2048;
  if (gemm == 1) return {format, 1, rows, 2, inner, hidden};
  return {format, 2, rows, 1, hidden, inner};
}

double median(std::vector<double> v) {
  const auto middle = v.begin() + static_cast<int64_t>(v.size() / 2);
  std::nth_element(v.begin(), middle, v.end());
  return *middle;
}

class Bench {
 public:
  Bench(const BenchOpOptions& options, cpu::Isa isa, int threads)
      : options_(options),
        isa_(isa),
        backend_(cpu::backend(isa)),
        pool_(threads, threads <= available_cpus() ? allowed_cpus() : std::vector<int>{}),
        memory_(static_cast<size_t>(options.pool_mb) << 20) {
    pool_.pin_caller();
    fill_memory();
    for (const auto a : {cpu::Arithmetic::kF32, cpu::Arithmetic::kBf16, cpu::Arithmetic::kInt8})
      peaks_.push_back(cpu::peak_gops(isa, pool_, a, 0.2));
  }

  const std::vector<double>& peaks() const { return peaks_; }
  nlohmann::json run(const Case& c);

 private:
  void fill_memory();
  void make_operands(const Case& c);
  double call(const Case& c, const std::byte* codes);

  const BenchOpOptions& options_;
  const cpu::Isa isa_;
  const ops::Backend& backend_;
  ThreadPool pool_;
  Arena arena_;
  // Weights are cut from it, one call's after the other's, so that none is found in a cache.
  AlignedBuffer memory_;
  AlignedBuffer scales_;
  AlignedBuffer row_memory_;
  quant::Rows rows_;
  std::vector<int32_t> offsets_;
  std::vector<float> out_;
  std::vector<double> peaks_;
};

// Codes that are small bf16 numbers when read as 16 bits, and no NaN when read as e4m3.
void Bench::fill_memory() {
  pool_.run([&](int thread, int threads) {
    auto* words = reinterpret_cast<uint64_t*>(memory_.data());
    const size_t count = memory_.size() / sizeof(uint64_t) / static_cast<size_t>(threads);
    uint64_t x = 0x9E3779B97F4A7C15U + static_cast<uint64_t>(thread);
    for (size_t i = 0; i < count; ++i) {
      x ^= x << 13;
      x ^= x >> 7;
      x ^= x << 17;
      words[count * static_cast<size_t>(thread) + i] =
          (x & 0x8077807780778077U) | 0x3c003c003c003c00U;
    }
  });
}

void Bench::make_operands(const Case& c) {
  const auto scale_count = static_cast<size_t>(c.n * quant::ceil_div(c.k, quant::kGroup));
  scales_ = AlignedBuffer(scale_count * sizeof(float));
  if (c.format == Format::kW4Afp8) {
    std::fill_n(reinterpret_cast<bf16*>(scales_.data()), scale_count, to_bf16(0.01f));
  } else {
    std::fill_n(reinterpret_cast<float*>(scales_.data()), scale_count, 0.01f);
  }
  const int64_t entries = c.rows * options_.experts;
  rows_ = {.format = quant::act_format(c.format, false), .count = entries, .k = c.k};
  row_memory_ = AlignedBuffer(static_cast<size_t>(entries * rows_.row_bytes()));
  rows_.data = row_memory_.data();
  std::vector<float> x(static_cast<size_t>(c.k));
  for (int64_t t = 0; t < entries; ++t) {
    float angle = static_cast<float>(t);
    for (float& v : x) v = std::sin(angle += 0.7f);
    quant::quantise_row(x.data(), rows_, t);
  }
  out_.resize(static_cast<size_t>(entries * c.parts * c.n));
  offsets_.clear();
  for (int64_t e = 0; e <= options_.experts; ++e)
    offsets_.push_back(static_cast<int32_t>(e * c.rows));
}

// Seconds of one grouped GEMM over the weights that start at `codes`.
double Bench::call(const Case& c, const std::byte* codes) {
  const int64_t code_bytes = c.code_bytes(backend_);
  std::vector<quant::Matrix> w;
  w.reserve(static_cast<size_t>(options_.experts * c.parts));
  for (int i = 0; i < options_.experts * c.parts; ++i) {
    quant::Matrix& m = w.emplace_back(c.matrix(backend_));
    m.codes = codes + i * code_bytes;
    m.scales = scales_.data();
  }
  arena_.reset();
  const TimePoint start = Clock::now();
  backend_.grouped_gemm(
      {rows_, nullptr, offsets_.data(), options_.experts, w.data(), c.parts, out_.data()},
      {pool_, arena_});
  return to_seconds(Clock::now() - start);
}

nlohmann::json Bench::run(const Case& c) {
  make_operands(c);
  const int64_t bytes = c.code_bytes(backend_) * c.parts * options_.experts;
  const auto size = static_cast<int64_t>(memory_.size());
  std::vector<double> times;
  std::vector<double> reads;
  std::vector<double> peaks;
  const cpu::Arithmetic arithmetic = cpu::arithmetic_of(c.format, isa_);
  // Plain reads of as many bytes take turns with the calls, half the pool away, so that whatever
  // else the machine does meets both alike.
  int64_t at = 0;
  int64_t read_at = size / 2;
  const auto advance = [&](int64_t from) { return from + 2 * bytes > size ? 0 : from + bytes; };
  if (read_at + bytes > size) read_at = 0;
  call(c, memory_.data());  // warms the scratch
  const TimePoint start = Clock::now();
  while (times.size() < 4 || to_seconds(Clock::now() - start) < options_.seconds) {
    at = advance(at);
    read_at = advance(read_at);
    reads.push_back(cpu::read_gbs(isa_, pool_, memory_.data() + read_at, bytes));
    if (peaks.size() < 8) peaks.push_back(cpu::peak_gops(isa_, pool_, arithmetic, 0.02));
    times.push_back(call(c, memory_.data() + at));
  }
  const double seconds = median(times);
  const double gbs = static_cast<double>(bytes) / seconds * 1e-9;
  const double gops =
      2.0 * static_cast<double>(c.rows * options_.experts * c.parts * c.n * c.k) / seconds * 1e-9;
  const double read = median(reads);
  const double peak = median(peaks);
  const double best = *std::min_element(times.begin(), times.end());
  const double best_read = *std::max_element(reads.begin(), reads.end());
  const double best_peak = *std::max_element(peaks.begin(), peaks.end());
  return {{"op", fmt::format("grouped_gemm_{}", c.gemm)},
          {"format", quant::format_name(c.format)},
          {"experts", options_.experts},
          {"rows", c.rows},
          {"n", c.parts * c.n},
          {"k", c.k},
          {"us", seconds * 1e6},
          {"gbs", gbs},
          {"read_gbs", read},
          {"read_percent", 100 * gbs / read},
          {"gops", gops},
          {"peak_gops", peak},
          {"peak_percent", 100 * gops / peak},
          {"best_us", best * 1e6},
          {"best_read_percent", 100 * static_cast<double>(bytes) / best * 1e-9 / best_read},
          {"best_peak_percent", 100 * gops * seconds / best / best_peak},
          {"samples", times.size()}};
}

void print_line(const nlohmann::json& r) {
  std::string line = fmt::format(
      "{:<15} {:<10} {:>3} x {:>4} rows  {:>5} -> {:<5} {:>9.1f} us {:>6.1f} GB/s {:>4.0f} % (best "
      "{:>3.0f} %)",
      r["op"].get<std::string>(), r["format"].get<std::string>(), r["experts"].get<int>(),
      r["rows"].get<int64_t>(), r["k"].get<int64_t>(), r["n"].get<int64_t>(), r["us"].get<double>(),
      r["gbs"].get<double>(), r["read_percent"].get<double>(),
      r["best_read_percent"].get<double>());
  if (r["rows"].get<int64_t>() >= 16) {
    line += fmt::format(" {:>7.0f} Gop/s {:>4.0f} % (best {:>3.0f} %)", r["gops"].get<double>(),
                        r["peak_percent"].get<double>(), r["best_peak_percent"].get<double>());
  }
  std::cout << line << std::endl;
}

Status check(const BenchOpOptions& o) {
  const auto positive = [](const std::vector<int64_t>& v) {
    return std::all_of(v.begin(), v.end(), [](int64_t x) { return x > 0 && x <= 65536; });
  };
  if (!positive(o.hidden)) return Status::usage("--hidden: sizes are 1 to 65536");
  if (!positive(o.rows)) return Status::usage("--rows: rows an expert are 1 to 65536");
  if (o.experts < 1 || o.experts > 1024) return Status::usage("--experts: 1 to 1024");
  if (o.threads < 0 || o.threads > 1024) return Status::usage("--threads: 0 to 1024");
  if (o.pool_mb < 1) return Status::usage("--pool-mb: at least 1");
  return Status::ok();
}

}  // namespace

Result<Format> parse_format(const std::string& name, std::span<const Format> known) {
  std::vector<std::string_view> names;
  for (const Format f : known) {
    names.push_back(quant::format_name(f));
    if (name == names.back()) return f;
  }
  return Status::usage(fmt::format("--format {}: not one of {}", name, fmt::join(names, ", ")));
}

Status bench_op(const BenchOpOptions& options) {
  RETURN_IF_ERROR(check(options));
  if (options.device == "cuda") return bench_op_gpu(options);
  if (options.device != "cpu") {
    return Status::usage(fmt::format("--device {}: take cpu or cuda", options.device));
  }
  ASSIGN_OR_RETURN(const cpu::Isa isa, cpu::choose_isa());
  std::vector<Case> cases;
  BenchOpOptions o = options;
  for (const std::string& name : o.formats) {
    ASSIGN_OR_RETURN(const Format format, parse_format(name, kFormats));
    for (const int64_t hidden : o.hidden) {
      for (const int64_t rows : o.rows) {
        for (const int gemm : {1, 2}) {
          const Case c = make_case(format, hidden, gemm, rows);
          cases.push_back(c);
          o.pool_mb = std::max(o.pool_mb,
                               (c.code_bytes(cpu::backend(isa)) * c.parts * o.experts >> 20) + 1);
        }
      }
    }
  }
  const int threads = o.threads > 0 ? o.threads : available_cpus();
  Bench bench(o, isa, threads);
  const std::vector<double>& peaks = bench.peaks();
  nlohmann::json all = {{"isa", cpu::isa_name(isa)},
                        {"threads", threads},
                        {"peak_gops", {{"f32", peaks[0]}, {"bf16", peaks[1]}, {"int8", peaks[2]}}},
                        {"results", nlohmann::json::array()}};
  if (!o.json) {
    std::cout << fmt::format("{}, {} threads; peaks f32 {:.0f}, bf16 {:.0f}, int8 {:.0f} Gop/s\n",
                             cpu::isa_name(isa), threads, peaks[0], peaks[1], peaks[2]);
  }
  for (const Case& c : cases) {
    all["results"].push_back(bench.run(c));
    if (!o.json) print_line(all["results"].back());
  }
  if (o.json) std::cout << all.dump() << std::endl;
  return Status::ok();
}

}  // namespace sortie::cli
