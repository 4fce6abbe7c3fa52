#include "cli/bench_load.h"

#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "backends/cpu/isa.h"
#include "base/clock.h"
#include "base/memory.h"
#include "cli/shapes.h"
#include "model/random_checkpoint.h"
#include "model/weights.h"

namespace sortie::cli {

namespace {

namespace fs = std::filesystem;

// What the loading process reports through its pipe.
struct Report {
  bool ok = false;
  double seconds = 0;
  int64_t peak_bytes = 0;
};

// Loads in a process of its own, whose peak nothing else has touched.
Result<Report> load_apart(const std::string& folder) {
  int ends[2];
  if (pipe(ends) != 0) return Status::exhausted("bench load: no pipe could be made");
  const pid_t child = fork();
  if (child < 0) return Status::exhausted("bench load: no process could be started");
  if (child == 0) {
    Report report;
    const TimePoint start = Clock::now();
    if (const auto config = model::load_config(folder); config.is_ok()) {
      const auto isa = cpu::choose_isa();
      const model::LoadOptions options{.pack_for = isa.is_ok() ? &cpu::backend(*isa) : nullptr,
                                       .quiet = true};
      report.ok = model::load_weights(folder, *config, options).is_ok();
    }
    report.seconds = to_seconds(Clock::now() - start);
    report.peak_bytes = peak_resident_bytes();
    const ssize_t written = write(ends[1], &report, sizeof report);
    _exit(written == sizeof report ? 0 : 1);
  }
  close(ends[1]);
  Report report;
  const bool whole = read(ends[0], &report, sizeof report) == sizeof report;
  close(ends[0]);
  waitpid(child, nullptr, 0);
  if (!whole || !report.ok) {
    return Status::internal(fmt::format("bench load: {} did not load", folder));
  }
  return report;
}

}  // namespace

Status bench_load(const BenchLoadOptions& o) {
  ASSIGN_OR_RETURN(const model::Config config, bench_shape(o.shape));
  ASSIGN_OR_RETURN(const BenchForm form, bench_form(o.format));
  if (o.folder.empty())
    return Status::usage("bench load needs --folder, where the checkpoint may lie");
  std::error_code error;
  const bool made = fs::create_directories(o.folder, error);
  if (error) {
    return Status::usage(fmt::format("--folder {}: {}", o.folder, error.message()));
  }
  if (!fs::exists(fs::path(o.folder) / "model.safetensors")) {
    RETURN_IF_ERROR(model::write_random_checkpoint(o.folder, config, form.dialect, 1));
  }
  const auto bytes = static_cast<int64_t>(fs::file_size(fs::path(o.folder) / "model.safetensors"));
  const Result<Report> report = load_apart(o.folder);
  if (made) fs::remove_all(o.folder, error);
  RETURN_IF_ERROR(report.status());
  const double ratio = static_cast<double>(report->peak_bytes) / static_cast<double>(bytes);
  if (o.json) {
    fmt::print("{}\n", nlohmann::ordered_json{{"bench", "load"},
                                              {"shape", o.shape},
                                              {"format", o.format},
                                              {"file_bytes", bytes},
                                              {"peak_bytes", report->peak_bytes},
                                              {"ratio", ratio},
                                              {"seconds", report->seconds}}
                           .dump());
  } else {
    fmt::print(
        "load {} {}: {:.2f} GiB of weights in {:.1f} s, peak resident {:.2f} GiB = {:.3f} x\n",
        o.shape, o.format, static_cast<double>(bytes) / 0x1p30, report->seconds,
        static_cast<double>(report->peak_bytes) / 0x1p30, ratio);
  }
  return Status::ok();
}

}  // namespace sortie::cli
