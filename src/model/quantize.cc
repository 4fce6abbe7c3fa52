#include "model/quantize.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <system_error>

#include "base/hash.h"
#include "base/json.h"
#include "base/progress.h"
#include "base/scalar.h"
#include "base/threads.h"
#include "model/quantize_plan.h"
#include "model/quantize_report.h"
#include "model/tensor_values.h"
#include "quant/matrix_ops.h"

namespace sortie::model {
namespace {

namespace fs = std::filesystem;
using quant::Format;

// In OUT.partial from its first to its last moment: what a later run may clear away or go on with.
// Its first line says what is being made of what, each other line names a shard that is whole, and
// the hash of what it holds. A run holds a lock on it.
constexpr const char* kMark = ".sortie-quantize-unfinished";

// What was written and what is read back are compared by this.
uint64_t hash_of(const std::byte* data, int64_t bytes) {
  return hash_bytes({data, static_cast<size_t>(bytes)});
}

Status io_error(const char* what, const fs::path& path, const std::error_code& error) {
  const std::string message =
      fmt::format("Cannot {} {}: {}.", what, path.string(), error.message());
  const bool full = error.value() == ENOSPC || error.value() == EDQUOT || error.value() == EFBIG;
  return full ? Status::exhausted(message) : Status::invalid(message);
}

std::error_code last_error() { return {errno, std::generic_category()}; }

Status write_text(const fs::path& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  return file ? Status::ok() : io_error("write", path, last_error());
}

// One tensor's bytes as they go to the file: codes, then scales.
class Converter {
 public:
  Converter(int threads, quant::Rounding rounding) : pool_(threads), rounding_(rounding) {}

  // parts[i] are the bytes of outputs[i], valid until the next call.
  Status convert(const QuantizePiece& piece, std::vector<const std::byte*>& parts) {
    parts.clear();
    switch (piece.kind) {
      case QuantizePiece::Kind::kCopy:
        parts.push_back(piece.source.data);
        return Status::ok();
      case QuantizePiece::Kind::kValue:
        parts.push_back(reinterpret_cast<const std::byte*>(&piece.value));
        return Status::ok();
      case QuantizePiece::Kind::kToBf16:
        widen(piece);
        parts.push_back(codes_.data());
        return Status::ok();
      case QuantizePiece::Kind::kQuantise:
        quantise(piece);
        parts.push_back(codes_.data());
        parts.push_back(scales_.data());
        return check_scales(piece);
    }
    return Status::ok();
  }

  // The source as numbers, valid until the next call.
  quant::Matrix matrix(const QuantizePiece& piece) {
    quant::Matrix m = piece.matrix;
    if (m.format == Format::kFp8Block) {  // copied: unaligned or E8M0 in the file
      source_scales_.resize(static_cast<size_t>(piece.source_scales.elements()));
      for (size_t i = 0; i < source_scales_.size(); ++i) {
        source_scales_[i] = value_at(piece.source_scales, static_cast<int64_t>(i));
      }
      m.scales = source_scales_.data();
    }
    return m;
  }

 private:
  void quantise(const QuantizePiece& piece) {
    const quant::Matrix m = matrix(piece);
    codes_.resize(static_cast<size_t>(piece.outputs[0].bytes()));
    scales_.resize(static_cast<size_t>(piece.outputs[1].bytes()));
    pool_.parallel_for(quant::ceil_div(m.n, quant::kGroup), [&](int64_t band) {
      const int64_t begin = band * quant::kGroup;
      quant::quantise_rows_as_stored(m, begin, std::min(m.n, begin + quant::kGroup), piece.to,
                                     codes_.data(), scales_.data(), rounding_);
    });
  }

  void widen(const QuantizePiece& piece) {
    const quant::Matrix m = matrix(piece);
    codes_.resize(static_cast<size_t>(piece.outputs[0].bytes()));
    auto* out = reinterpret_cast<bf16*>(codes_.data());
    std::vector<float> row(static_cast<size_t>(m.k));
    for (int64_t r = 0; r < m.n; ++r) {
      quant::dequantise_row(m, r, row.data());
      std::transform(row.begin(), row.end(), out + r * m.k, sortie::to_bf16);
    }
  }

  // A NaN or an infinity in the source shows as a NaN scale (quant/amax.h).
  Status check_scales(const QuantizePiece& piece) const {
    const bool narrow = piece.outputs[1].dtype == DType::kBf16;
    for (size_t i = 0; i < scales_.size(); i += narrow ? 2 : 4) {
      const float s =
          narrow ? to_float(load_unaligned<bf16>(&scales_[i])) : load_unaligned<float>(&scales_[i]);
      if (!std::isfinite(s)) {
        return Status::invalid(fmt::format(
            "{} holds NaN or infinite values and cannot be quantised.", piece.outputs[0].name));
      }
    }
    return Status::ok();
  }

  ThreadPool pool_;
  const quant::Rounding rounding_;
  std::vector<std::byte> codes_, scales_;
  std::vector<float> source_scales_;
};

class Quantizer {
 public:
  explicit Quantizer(const QuantizeOptions& options)
      : options_(options), in_(options.in), out_(options.out) {
    if (!out_.has_filename()) out_ = out_.parent_path();  // "out/"
    partial_ = out_.string() + ".partial";
  }
  ~Quantizer() {
    if (lock_ >= 0) ::close(lock_);
  }
  Quantizer(const Quantizer&) = delete;
  Quantizer& operator=(const Quantizer&) = delete;

  Status run() {
    RETURN_IF_ERROR(check_options());
    ASSIGN_OR_RETURN(const Config config, load_config(options_.in));
    RETURN_IF_ERROR(check_source(config));
    ASSIGN_OR_RETURN(const std::unique_ptr<Checkpoint> source, Checkpoint::open(options_.in));
    ASSIGN_OR_RETURN(const std::vector<QuantizeShard> shards, plan_quantize(*source, options_));
    ASSIGN_OR_RETURN(const std::string text,
                     read_text_file((in_ / "config.json").string(), kMaxConfigBytes));
    ASSIGN_OR_RETURN(const std::string config_json,
                     quantised_config_json(text, *source, config, options_));
    identify(text, shards);
    if (!options_.report.empty() && !std::ofstream(options_.report, std::ios::app)) {
      return io_error("write", options_.report, last_error());
    }
    RETURN_IF_ERROR(open_partial());
    Status status = write_all(*source, shards, config_json);
    if (status.is_ok()) status = publish();
    if (status.is_ok()) return status;
    const bool can_go_on =
        status.code() == StatusCode::kCancelled || status.code() == StatusCode::kExhausted;
    if (can_go_on && !whole_.empty()) {
      return Status(status.code(),
                    fmt::format("{} {} of {} shards are whole in {}: the same command goes on.",
                                status.message(), whole_.size(), shards.size(), partial_.string()));
    }
    std::error_code ignored;
    fs::remove_all(partial_, ignored);
    return status;
  }

 private:
  Status check_options() const {
    if (options_.format == Quantization::kNone) {
      return Status::usage("quantize needs --format w4afp8, w8a8_int8 or fp8_block.");
    }
    if (options_.format != Quantization::kW4Afp8 && options_.dense_fp8_block) {
      return Status::usage("--dense fp8_block goes with --format w4afp8.");
    }
    if (options_.format != Quantization::kW4Afp8 &&
        options_.rounding != quant::Rounding::kNearest) {
      return Status::usage("--rounding search goes with --format w4afp8.");
    }
    if (options_.format != Quantization::kW4Afp8 && !options_.expert_amax.empty()) {
      return Status::usage(
          "--calibrate goes with --format w4afp8: the others have no static scales.");
    }
    if (out_.empty()) return Status::usage("quantize needs a folder to write to.");
    std::error_code error;
    if (fs::exists(out_, error) && !(fs::is_directory(out_, error) && fs::is_empty(out_, error))) {
      return Status::usage(fmt::format(
          "{} exists and is not an empty folder; name another one or remove it.", out_.string()));
    }
    return Status::ok();
  }

  Status check_source(const Config& config) const {
    const bool fp8 = config.dialect == Dialect::kFp8Block;
    if (config.dialect == Dialect::kBf16 || (fp8 && options_.format != Quantization::kFp8Block)) {
      return Status::ok();
    }
    return Status::usage(
        fmt::format("{} is quantised already; give a bf16 checkpoint{}.", options_.in,
                    options_.format == Quantization::kFp8Block ? "" : ", or one in fp8_block"));
  }

  // What a later run must find equal to go on: the options, and the source as far as its files'
  // names, sizes and times tell.
  void identify(const std::string& config, const std::vector<QuantizeShard>& shards) {
    std::string all =
        fmt::format("{} {} {} {}", static_cast<int>(options_.format), options_.dense_fp8_block,
                    static_cast<int>(options_.rounding), fs::weakly_canonical(in_).string());
    for (const auto& layer : options_.expert_amax) {
      for (const auto& [first, second] : layer) all += fmt::format(" {:a} {:a}", first, second);
      all += ";";
    }
    for (const QuantizeShard& shard : shards) {
      std::error_code error;
      const fs::path file = in_ / shard.file_name;
      all += fmt::format(" {} {} {}", shard.file_name, fs::file_size(file, error),
                         fs::last_write_time(file, error).time_since_epoch().count());
    }
    all += config;
    identity_ = fmt::format("{:016x}", hash_bytes(std::as_bytes(std::span(all))));
  }

  // Goes on with what an earlier run of the same command left, and clears away what another left
  // when it was killed, but no folder of the user's.
  Status open_partial() {
    std::error_code error;
    if (fs::exists(partial_, error)) {
      if (!fs::exists(partial_ / kMark, error) && !fs::is_empty(partial_, error)) {
        return Status::usage(fmt::format("{} is in the way; remove it.", partial_.string()));
      }
      RETURN_IF_ERROR(lock_mark());
      std::ifstream mark(partial_ / kMark);
      std::string line;
      if (std::getline(mark, line) && line == identity_) {
        while (std::getline(mark, line)) take_if_whole(line);
        return Status::ok();
      }
      for (const fs::directory_entry& left : fs::directory_iterator(partial_, error)) {
        if (left.path().filename() != kMark) fs::remove_all(left.path(), error);
      }
    }
    fs::create_directories(partial_, error);
    if (error) return io_error("create", partial_, error);
    RETURN_IF_ERROR(lock_mark());
    return write_text(partial_ / kMark, identity_ + "\n");
  }

  // Two runs that write to the same folder would take each other's files for their own.
  Status lock_mark() {
    if (lock_ >= 0) return Status::ok();
    const std::string path = (partial_ / kMark).string();
    lock_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (lock_ < 0) return io_error("open", path, last_error());
    if (::flock(lock_, LOCK_EX | LOCK_NB) == 0) return Status::ok();
    return Status::usage(fmt::format("Another run is writing {}.", partial_.string()));
  }

  // A line "name hash" of the mark counts if the file still holds that.
  void take_if_whole(const std::string& line) {
    const size_t space = line.rfind(' ');
    if (space == std::string::npos) return;
    const std::string name = line.substr(0, space);
    const auto written = Checkpoint::open_file((partial_ / name).string());
    if (!written.is_ok()) return;
    std::map<std::string, uint64_t> hashes;
    for (const auto& [tensor, entry] : (*written)->tensors()) {
      hashes[tensor] = hash_of(entry.tensor.data, entry.tensor.bytes());
      (*written)->drop_pages(entry.tensor);
    }
    if ((*written)->check().is_ok() && line == mark_line(name, hashes)) whole_.insert(name);
  }

  static std::string mark_line(const std::string& shard,
                               const std::map<std::string, uint64_t>& hashes) {
    std::string all;
    for (const auto& [name, hash] : hashes) all += fmt::format("{} {:x};", name, hash);
    return fmt::format("{} {:016x}", shard, hash_bytes(std::as_bytes(std::span(all))));
  }

  // The shard's file was synced and renamed before; a line that is lost costs that shard's time.
  Status note_whole(const std::string& shard, const std::map<std::string, uint64_t>& hashes) {
    std::ofstream mark(partial_ / kMark, std::ios::app);
    mark << mark_line(shard, hashes) << std::endl;
    if (!mark) return io_error("write", partial_ / kMark, last_error());
    whole_.insert(shard);
    return Status::ok();
  }

  Status write_all(const Checkpoint& source, const std::vector<QuantizeShard>& shards,
                   const std::string& config_json) {
    RETURN_IF_ERROR(check_space(shards));
    Progress progress(fmt::format("quantize to {}", out_.string()), source.bytes() >> 20, "MiB",
                      options_.quiet);
    Converter converter(std::max(1, options_.threads), options_.rounding);
    QuantizeReport report;
    for (const QuantizeShard& shard : shards) {
      if (whole_.contains(shard.file_name)) {
        for (const QuantizePiece& piece : shard.pieces) advance(piece, progress);
      } else {
        RETURN_IF_ERROR(write_shard(source, shard, converter, progress));
      }
      if (!options_.report.empty()) RETURN_IF_ERROR(measure(source, shard, converter, report));
    }
    progress.finish();
    if (!options_.report.empty()) RETURN_IF_ERROR(write_report(report));
    if (fs::exists(in_ / "model.safetensors.index.json") &&
        !fs::exists(in_ / "model.safetensors")) {
      RETURN_IF_ERROR(write_index(shards));
    }
    RETURN_IF_ERROR(write_text(partial_ / "config.json", config_json));
    const std::string mark = quantised_hf_quant_config(options_.format);
    if (!mark.empty()) RETURN_IF_ERROR(write_text(partial_ / "hf_quant_config.json", mark));
    RETURN_IF_ERROR(copy_other_files());
    // Whatever reads OUT later must be able to.
    RETURN_IF_ERROR(load_config(partial_.string()).status());
    return Checkpoint::open(partial_.string()).status();
  }

  Status check_space(const std::vector<QuantizeShard>& shards) const {
    int64_t needed = 0;
    for (const QuantizeShard& shard : shards) {
      for (const QuantizePiece& piece : shard.pieces) {
        for (const QuantizeOutput& output : piece.outputs) needed += output.bytes();
      }
    }
    std::error_code error;
    const fs::space_info space = fs::space(partial_, error);
    if (error || static_cast<int64_t>(space.available) >= needed) return Status::ok();
    return Status::exhausted(fmt::format("{} needs {} MiB and its disk has {} MiB free.",
                                         out_.string(), (needed >> 20) + 1, space.available >> 20));
  }

  Status write_shard(const Checkpoint& source, const QuantizeShard& shard, Converter& converter,
                     Progress& progress) {
    const std::string path = (partial_ / shard.file_name).string();
    std::map<std::string, uint64_t> hashes;
    SafetensorsWriter writer;
    for (const QuantizePiece& piece : shard.pieces) {
      for (const QuantizeOutput& o : piece.outputs) writer.declare(o.name, o.dtype, o.shape);
    }
    RETURN_IF_ERROR(writer.open(path));
    std::vector<const std::byte*> parts;
    for (const QuantizePiece& piece : shard.pieces) {
      if (options_.stop && options_.stop()) {
        return Status::cancelled("Quantizing was stopped.");
      }
      RETURN_IF_ERROR(converter.convert(piece, parts));
      for (size_t i = 0; i < parts.size(); ++i) {
        const QuantizeOutput& output = piece.outputs[i];
        RETURN_IF_ERROR(writer.write(parts[i], output.bytes()));
        hashes[output.name] = hash_of(parts[i], output.bytes());
      }
      if (piece.kind != QuantizePiece::Kind::kValue) source.drop_pages(piece.source);
      advance(piece, progress);
    }
    RETURN_IF_ERROR(source.check());
    RETURN_IF_ERROR(writer.finish());
    RETURN_IF_ERROR(verify(path, shard, hashes));
    return note_whole(shard.file_name, hashes);
  }

  void advance(const QuantizePiece& piece, Progress& progress) {
    if (piece.kind == QuantizePiece::Kind::kValue) return;
    done_ += piece.source.bytes();
    progress.add((done_ >> 20) - shown_);
    shown_ = done_ >> 20;
  }

  // From the files as they are, so also of shards that an earlier run made.
  Status measure(const Checkpoint& source, const QuantizeShard& shard, Converter& converter,
                 QuantizeReport& report) const {
    ASSIGN_OR_RETURN(const std::unique_ptr<Checkpoint> written,
                     Checkpoint::open_file((partial_ / shard.file_name).string()));
    for (const QuantizePiece& piece : shard.pieces) {
      if (piece.kind != QuantizePiece::Kind::kQuantise) continue;
      const Tensor* codes = written->find(piece.outputs[0].name);
      const Tensor* scales = written->find(piece.outputs[1].name);
      if (codes == nullptr || scales == nullptr) {
        return Status::internal(fmt::format("{} is not in its shard.", piece.outputs[0].name));
      }
      report.add(piece.outputs[0].name, converter.matrix(piece), piece.to, *codes, *scales);
      source.drop_pages(piece.source);
      written->drop_pages(*codes);
    }
    return written->check();
  }

  Status write_report(const QuantizeReport& report) const {
    RETURN_IF_ERROR(write_text(options_.report, report.json()));
    fmt::print("{}\n", report.summary());
    return Status::ok();
  }

  static Status verify(const std::string& path, const QuantizeShard& shard,
                       const std::map<std::string, uint64_t>& hashes) {
    ASSIGN_OR_RETURN(const std::unique_ptr<Checkpoint> written, Checkpoint::open_file(path));
    for (const QuantizePiece& piece : shard.pieces) {
      for (const QuantizeOutput& o : piece.outputs) {
        const Tensor* t = written->find(o.name);
        if (t == nullptr || t->dtype != o.dtype || t->bytes() != o.bytes() ||
            hash_of(t->data, t->bytes()) != hashes.at(o.name)) {
          return Status::internal(
              fmt::format("{} of {} does not read back as written; check the disk.", o.name, path));
        }
        written->drop_pages(*t);
      }
    }
    return written->check();
  }

  Status write_index(const std::vector<QuantizeShard>& shards) const {
    std::map<std::string, std::string> map;
    int64_t bytes = 0;
    for (const QuantizeShard& shard : shards) {
      for (const QuantizePiece& piece : shard.pieces) {
        for (const QuantizeOutput& o : piece.outputs) {
          map[o.name] = shard.file_name;
          bytes += o.bytes();
        }
      }
    }
    const nlohmann::ordered_json index = {{"metadata", {{"total_size", bytes}}},
                                          {"weight_map", map}};
    return write_text(partial_ / "model.safetensors.index.json", index.dump(2) + "\n");
  }

  // Tokenizer, generation_config and whatever else lies beside the weights. Sub-folders and weights
  // in other forms stay behind, and so does what a link would fetch from outside the model folder.
  Status copy_other_files() const {
    std::error_code error;
    fs::directory_iterator files(in_, error);
    if (error) return io_error("read", in_, error);
    for (const fs::directory_entry& file : files) {
      const std::string name = file.path().filename().string();
      if (!fs::is_regular_file(file.path(), error) || is_replaced(name)) continue;
      if (file.is_symlink(error) && !stays_inside(file.path())) {
        return Status::invalid(
            fmt::format("{} is a link that leaves the model folder.", file.path().string()));
      }
      // A run that was killed may have left a piece of it.
      fs::copy_file(file.path(), partial_ / name, fs::copy_options::overwrite_existing, error);
      if (error) return io_error("copy", file.path(), error);
    }
    return Status::ok();
  }

  static bool is_replaced(const std::string& name) {
    for (const char* end : {".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json",
                            ".pt", ".pth", ".gguf", ".partial"}) {
      if (name.ends_with(end)) return true;
    }
    return name == "config.json" || name == "hf_quant_config.json" || name == "quant_cfg.json";
  }

  // A Hugging Face snapshot's files are links to ../../blobs.
  bool stays_inside(const fs::path& link) const {
    std::error_code error;
    const fs::path root = fs::canonical(in_, error);
    const fs::path parent = fs::canonical(link, error).parent_path();
    return parent == root || (root.parent_path().filename() == "snapshots" &&
                              parent == root.parent_path().parent_path() / "blobs");
  }

  Status publish() const {
    std::error_code error;
    fs::rename(partial_, out_, error);  // over an empty folder, if there is one
    if (error) return io_error("rename to", out_, error);
    fs::remove(out_ / kMark, error);
    return Status::ok();
  }

  const QuantizeOptions& options_;
  const fs::path in_;
  fs::path out_;
  fs::path partial_;
  std::string identity_;         // of source and options, in the mark
  std::set<std::string> whole_;  // shards that are written and verified
  int lock_ = -1;
  int64_t done_ = 0;
  int64_t shown_ = 0;
};

}  // namespace

Status quantize_checkpoint(const QuantizeOptions& options) { return Quantizer(options).run(); }

}  // namespace sortie::model
