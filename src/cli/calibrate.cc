#include "cli/calibrate.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/progress.h"
#include "base/scalar.h"
#include "cli/ranks.h"
#include "cli/sequence.h"
#include "text/tokenizer.h"

namespace sortie::cli {

namespace {

// The token sequences of a calibration file.
Result<std::vector<std::vector<int32_t>>> read_sequences(const RunOptions& options, int64_t vocab) {
  std::ifstream file(options.calibrate);
  if (!file) {
    return Status::usage(fmt::format("--calibrate {}: the file cannot be read", options.calibrate));
  }
  std::vector<std::vector<int32_t>> sequences;
  std::shared_ptr<const text::Tokenizer> tokenizer;
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const auto where = [&] { return fmt::format("{} line {}", options.calibrate, number); };
    try {
      const nlohmann::json row = nlohmann::json::parse(line);
      if (row.contains("ids")) {
        sequences.push_back(row["ids"].get<std::vector<int32_t>>());
      } else {
        if (!tokenizer) {
          ASSIGN_OR_RETURN(tokenizer, text::Tokenizer::load(options.model));
        }
        ASSIGN_OR_RETURN(auto ids, tokenizer->encode(row.at("text").get<std::string>(), true));
        sequences.push_back(std::move(ids));
      }
    } catch (const nlohmann::json::exception&) {
      return Status::invalid(where() + ": not a JSON object with \"ids\" or \"text\"");
    }
    for (const int32_t id : sequences.back()) {
      if (id < 0 || id >= vocab) {
        return Status::invalid(
            fmt::format("{}: token id {} is outside the vocabulary of {}", where(), id, vocab));
      }
    }
    if (sequences.back().empty()) sequences.pop_back();
  }
  if (sequences.empty()) {
    return Status::invalid(
        fmt::format("{} holds no sequence to calibrate with", options.calibrate));
  }
  return sequences;
}

}  // namespace

Result<model::Model::ExpertAmax> calibrate(const RunOptions& options) {
  ASSIGN_OR_RETURN(const model::Config config, model::load_config(options.model));
  if (config.dialect != model::Dialect::kBf16) {
    return Status::usage(
        fmt::format("--calibrate runs the model unquantised, but {} is {}: give a bf16 checkpoint",
                    options.model, quantization_name(config, {})));
  }
  ASSIGN_OR_RETURN(auto sequences, read_sequences(options, config.vocab_size));
  const auto limit = static_cast<size_t>(std::max<int64_t>(1, config.max_position_embeddings));
  size_t longest = 0;
  for (auto& s : sequences) {
    s.resize(std::min(s.size(), limit));
    longest = std::max(longest, s.size());
  }
  RunOptions run;
  run.model = options.model;
  run.device = options.device;
  run.threads = options.threads;
  run.quiet = options.quiet;
  run.context_length = static_cast<int64_t>(longest);
  run.mtp = config.num_nextn_predict_layers > 0;
  run.max_total_tokens = run.context_length;
  ASSIGN_OR_RETURN(const auto ranks, Ranks::open(run, {}));
  model::Model& model = *ranks->local()[0].model;
  model.record_amax(true);
  Progress progress("calibrate", static_cast<int64_t>(sequences.size()), "sequences", run.quiet);
  for (const auto& ids : sequences) {
    Sequence sequence(0, run.context_length, run.page_size);
    for (size_t begin = 0; begin < ids.size();) {
      const size_t count =
          std::min(ids.size() - begin, static_cast<size_t>(run.chunked_prefill_size));
      model::Step step;
      sequence.append(step, std::span<const int32_t>(ids).subspan(begin, count), true, false);
      ASSIGN_OR_RETURN(const model::Model::Output output, model.forward(step));
      begin += count;
      // The row behind which the text ends is taken to repeat its token.
      std::vector<int32_t> next(step.ids.begin() + 1, step.ids.end());
      next.push_back(ids[std::min(begin, ids.size() - 1)]);
      for (int layer = 0; layer < config.num_nextn_predict_layers; ++layer) {
        RETURN_IF_ERROR(model.forward_mtp(layer, step, output.hidden, next.data()).status());
      }
    }
    progress.add(1);
  }
  return model.expert_amax();
}

Result<std::vector<std::array<float, 2>>> calibrated_scales(const RunOptions& options) {
  ASSIGN_OR_RETURN(const auto amax, calibrate(options));
  std::vector<std::array<float, 2>> scales(amax.size());
  for (size_t layer = 0; layer < amax.size(); ++layer) {
    for (const auto& expert : amax[layer]) {
      for (size_t gemm = 0; gemm < 2; ++gemm) {
        // As a checkpoint stores it (docs/formats.md), then the maximum over the layer.
        scales[layer][gemm] = std::max(scales[layer][gemm], round_to_bf16(expert[gemm] / kE4m3Max));
      }
    }
  }
  return scales;
}

}  // namespace sortie::cli
