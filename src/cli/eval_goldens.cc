#include "cli/eval_goldens.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "base/progress.h"
#include "cli/sequence.h"
#include "engine/sampler.h"
#include "model/safetensors.h"

namespace sortie::cli {

namespace {

// One sequence with a reference's numbers: teacher-forced logits, and for golden.json what the
// reference generated.
struct Golden {
  std::vector<int32_t> prompt;
  std::vector<int32_t> greedy;                              // golden.json only
  std::vector<float> logits;                                // golden.safetensors: [prompt, vocab]
  std::vector<std::vector<std::pair<int32_t, float>>> top;  // golden.json: per greedy token
  std::vector<int32_t> mtp;
  double margin = 0;

  int64_t length() const { return static_cast<int64_t>(prompt.size() + greedy.size()); }
};

struct Outcome {
  double error = 0;      // relative Frobenius
  int64_t compared = 0;  // argmaxes compared
  int64_t agree = 0;
  int64_t clear_misses = 0;  // argmaxes that differ where the golden's best two are far apart
  bool greedy_equal = true;  // golden.json: own continuation equals the reference's
  int64_t mtp_agree = 0;
};

Result<std::vector<Golden>> read_safetensors(const std::string& path, int64_t vocab) {
  ASSIGN_OR_RETURN(const auto file, model::Checkpoint::open_file(path));
  std::vector<Golden> goldens;
  for (int j = 0;; ++j) {
    const Tensor* ids = file->find(fmt::format("ids.{}", j));
    const Tensor* logits = file->find(fmt::format("logits.{}", j));
    if (ids == nullptr || logits == nullptr) break;
    const int64_t length = ids->elements();
    if (ids->dtype != DType::kI32 || logits->dtype != DType::kF32 || length == 0 ||
        logits->elements() != length * vocab) {
      return Status::invalid(fmt::format(
          "{}: ids.{} must be I32 [T] and logits.{} F32 [T, {}] with T > 0", path, j, j, vocab));
    }
    Golden g;
    g.prompt.resize(static_cast<size_t>(length));
    g.logits.resize(static_cast<size_t>(length * vocab));
    std::memcpy(g.prompt.data(), ids->data, static_cast<size_t>(ids->bytes()));
    std::memcpy(g.logits.data(), logits->data, static_cast<size_t>(logits->bytes()));
    goldens.push_back(std::move(g));
  }
  return goldens;
}

Result<std::vector<Golden>> read_json(const std::string& path) {
  std::ifstream file(path);
  std::vector<Golden> goldens;
  try {
    for (const nlohmann::json& row : nlohmann::json::parse(file)) {
      Golden g;
      g.prompt = row.at("prompt_ids").get<std::vector<int32_t>>();
      g.greedy = row.at("greedy_ids").get<std::vector<int32_t>>();
      for (const nlohmann::json& step : row.at("top_logprobs")) {
        auto& top = g.top.emplace_back();
        for (const nlohmann::json& pair : step) top.emplace_back(pair.at(0), pair.at(1));
      }
      if (row.contains("mtp_argmax")) g.mtp = row["mtp_argmax"].get<std::vector<int32_t>>();
      g.margin = row.at("margin");
      if (g.prompt.empty() || g.greedy.empty() || g.top.size() != g.greedy.size()) {
        return Status::invalid(fmt::format(
            "{}: a row needs prompt_ids, greedy_ids and one top_logprobs list a greedy id", path));
      }
      goldens.push_back(std::move(g));
    }
  } catch (const nlohmann::json::exception& e) {
    return Status::invalid(fmt::format("{} is not a golden file: {}", path, e.what()));
  }
  return goldens;
}

Status check_ids(const std::vector<Golden>& goldens, const std::string& path, int64_t vocab) {
  if (goldens.empty()) {
    return Status::invalid(fmt::format(
        "{} holds no golden sequence (ids.0 and logits.0, or a JSON list of prompts)", path));
  }
  const auto bad = [&](int32_t id) { return id < 0 || id >= vocab; };
  for (const Golden& g : goldens) {
    bool wrong = std::any_of(g.prompt.begin(), g.prompt.end(), bad) ||
                 std::any_of(g.greedy.begin(), g.greedy.end(), bad);
    for (const auto& top : g.top) {
      for (const auto& [id, value] : top) wrong = wrong || bad(id);
    }
    if (wrong) {
      return Status::invalid(fmt::format(
          "{} has token ids outside the model's vocabulary of {}: it is for another model", path,
          vocab));
    }
  }
  return Status::ok();
}

// Squared distance and squared size, summed; error() is the relative Frobenius norm.
struct Distance {
  double difference = 0;
  double size = 0;
  void add(double ours, double theirs) {
    difference += (ours - theirs) * (ours - theirs);
    size += theirs * theirs;
  }
  double error() const {
    return std::isfinite(difference) ? std::sqrt(difference / std::max(size, 1e-300)) : INFINITY;
  }
};

int32_t argmax(const float* v, int64_t n) {
  return static_cast<int32_t>(std::max_element(v, v + n) - v);
}

// Between the largest value and the next.
float gap(const float* v, int64_t n) {
  const int32_t best = argmax(v, n);
  float second = -INFINITY;
  for (int64_t i = 0; i < n; ++i) {
    if (i != best) second = std::max(second, v[i]);
  }
  return v[best] - second;
}

// Gaps that bf16 activations can close; fp32's are a matter of the order of sums.
constexpr double kMargin = 1e-3;
constexpr double kRoundedMargin = 0.05;

// Runs the goldens on one rank; the other ranks of the group take part with empty steps, so every
// rank must call this with the same goldens.
class Runner {
 public:
  Runner(Rank& rank, const std::vector<Golden>& goldens)
      : model_(*rank.model), goldens_(goldens), front_(rank.index == 0) {}

  Result<std::vector<Outcome>> run(Progress& progress) {
    std::vector<Outcome> outcomes(goldens_.size());
    for (size_t i = 0; i < goldens_.size(); ++i) {
      RETURN_IF_ERROR(goldens_[i].greedy.empty() ? compare_logits(goldens_[i], outcomes[i])
                                                 : teacher_force(goldens_[i], outcomes[i]));
      if (front_) progress.add(1);
    }
    RETURN_IF_ERROR(generate(outcomes));
    return outcomes;
  }

 private:
  using Output = model::Model::Output;

  Result<Output> forward(model::Step& step) {
    if (!front_) {
      const bool prefill = step.any_prefill_anywhere;
      step.clear();
      step.any_prefill_anywhere = prefill;
    }
    return model_.forward(step);
  }

  Status compare_logits(const Golden& g, Outcome& outcome) {
    const int64_t vocab = model_.config().vocab_size;
    Sequence sequence(0, g.length(), model_.options().page_size);
    model::Step step;
    sequence.append(step, g.prompt, true, true);
    ASSIGN_OR_RETURN(const Output output, forward(step));
    if (!front_) return Status::ok();
    ASSIGN_OR_RETURN(const float* all, model_.on_host(output.logits, g.length() * vocab));
    Distance distance;
    for (size_t t = 0; t < g.prompt.size(); ++t) {
      const float* ours = all + static_cast<int64_t>(t) * vocab;
      const float* theirs = g.logits.data() + static_cast<int64_t>(t) * vocab;
      for (int64_t i = 0; i < vocab; ++i) distance.add(ours[i], theirs[i]);
      const bool agree = argmax(ours, vocab) == argmax(theirs, vocab);
      outcome.agree += agree ? 1 : 0;
      outcome.clear_misses += !agree && gap(theirs, vocab) > kRoundedMargin ? 1 : 0;
    }
    outcome.compared = static_cast<int64_t>(g.prompt.size());
    outcome.error = distance.error();
    return Status::ok();
  }

  // The prompt through prefill, the reference's continuation through decode rows.
  Status teacher_force(const Golden& g, Outcome& outcome) {
    Sequence sequence(0, g.length(), model_.options().page_size);
    model::Step prompt;
    sequence.append(prompt, g.prompt, true, false);
    Distance distance;
    RETURN_IF_ERROR(compare_top(g, 0, 1, prompt, g.greedy, outcome, distance));
    // Row i of the second step is greedy token i, whose logits speak of token i + 1.
    model::Step rest;
    const std::span<const int32_t> greedy(g.greedy);
    sequence.append(rest, greedy.first(greedy.size() - 1), false, true);
    RETURN_IF_ERROR(compare_top(g, 1, static_cast<int64_t>(g.greedy.size()) - 1, rest,
                                greedy.subspan(1), outcome, distance));
    outcome.compared = static_cast<int64_t>(g.greedy.size());
    outcome.error = distance.error();
    return Status::ok();
  }

  // Runs a step whose logits are those of greedy tokens [first, first + count), compares them, and
  // lets the MTP layer guess one further. `next` are the tokens that follow the step's last `count`
  // rows.
  Status compare_top(const Golden& g, int64_t first, int64_t count, model::Step& step,
                     std::span<const int32_t> next, Outcome& outcome, Distance& distance) {
    std::vector<int32_t> next_ids(step.ids.begin() + (step.ids.empty() ? 0 : 1), step.ids.end());
    if (step.ids.size() > static_cast<size_t>(count)) {
      next_ids.push_back(next[0]);  // the prompt's last row
    } else {
      next_ids.assign(next.begin(), next.begin() + count);
    }
    ASSIGN_OR_RETURN(const Output output, forward(step));
    const int64_t vocab = model_.config().vocab_size;
    const float* all = nullptr;
    if (front_) {
      ASSIGN_OR_RETURN(all, model_.on_host(output.logits, count * vocab));
    }
    for (int64_t i = 0; front_ && i < count; ++i) {
      const float* logits = all + i * vocab;
      const auto& top = g.top[static_cast<size_t>(first + i)];
      const double norm = engine::log_sum_exp({logits, static_cast<size_t>(vocab)});
      for (const auto& [id, theirs] : top) distance.add(logits[id] - norm, theirs);
      outcome.agree += argmax(logits, vocab) == g.greedy[static_cast<size_t>(first + i)] ? 1 : 0;
    }
    if (g.mtp.empty() || !model_.options().mtp) return Status::ok();
    ASSIGN_OR_RETURN(const Output guess,
                     model_.forward_mtp(0, step, output.hidden, next_ids.data()));
    if (front_) {
      ASSIGN_OR_RETURN(all, model_.on_host(guess.logits, count * vocab));
    }
    for (int64_t i = 0; front_ && i < count; ++i) {
      const bool equal = argmax(all + i * vocab, vocab) == g.mtp[static_cast<size_t>(first + i)];
      outcome.mtp_agree += equal ? 1 : 0;
    }
    return Status::ok();
  }

  // All prompts together, greedily, one token a step.
  Status generate(std::vector<Outcome>& outcomes) {
    struct Running {
      size_t index;
      Sequence sequence;
      std::vector<int32_t> output;
    };
    std::vector<Running> running;
    int64_t longest = 0;
    int32_t page = 0;
    for (size_t i = 0; i < goldens_.size(); ++i) {
      if (goldens_[i].greedy.empty()) continue;
      const int64_t page_size = model_.options().page_size;
      running.push_back({i, Sequence(page, goldens_[i].length(), page_size), {}});
      page += static_cast<int32_t>(Sequence::pages(goldens_[i].length(), page_size));
      longest = std::max(longest, static_cast<int64_t>(goldens_[i].greedy.size()));
    }
    for (int64_t n = 0; n < longest; ++n) {
      model::Step step;
      std::vector<Running*> rows;
      for (Running& r : running) {
        const Golden& g = goldens_[r.index];
        if (n >= static_cast<int64_t>(g.greedy.size())) continue;
        const std::span<const int32_t> last(r.output.data(), r.output.size());
        r.sequence.append(step, n == 0 ? std::span<const int32_t>(g.prompt) : last.last(1), n == 0,
                          false);
        rows.push_back(&r);
      }
      ASSIGN_OR_RETURN(const Output output, forward(step));
      const int64_t vocab = model_.config().vocab_size;
      const float* all = nullptr;
      if (front_) {
        ASSIGN_OR_RETURN(all,
                         model_.on_host(output.logits, static_cast<int64_t>(rows.size()) * vocab));
      }
      for (size_t i = 0; i < rows.size(); ++i) {
        // The other ranks feed nothing; any token keeps their loop in step.
        rows[i]->output.push_back(front_ ? argmax(all + static_cast<int64_t>(i) * vocab, vocab)
                                         : 0);
      }
    }
    for (const Running& r : running) {
      outcomes[r.index].greedy_equal = r.output == goldens_[r.index].greedy;
    }
    return Status::ok();
  }

  model::Model& model_;
  const std::vector<Golden>& goldens_;
  const bool front_;
};

// Prints each sequence and says whether the rule holds: fp32 activations to rounding; bf16 ones (on
// a GPU) or bf16 latents, `rounded`, to what they can do. There the best log-probabilities of
// golden.json are shown, not judged.
Status judge(const std::vector<Golden>& goldens, const std::vector<Outcome>& outcomes,
             std::optional<double> tolerance, bool quantised, bool rounded) {
  const double usual = quantised ? (rounded ? 5e-2 : 1e-5) : (rounded ? 2e-2 : 1e-4);
  const bool judge_errors = !rounded || tolerance || goldens[0].greedy.empty();
  const double strict = judge_errors ? tolerance.value_or(usual) : INFINITY;
  size_t within = 0;
  double worst = 0;
  int64_t broken = 0;
  for (size_t i = 0; i < goldens.size(); ++i) {
    const Golden& g = goldens[i];
    const Outcome& o = outcomes[i];
    within += o.error <= strict ? 1 : 0;
    worst = std::max(worst, o.error);
    std::string line =
        fmt::format("sequence {:2}: {:4} tokens  relative error {:.2e}  argmax {}/{}", i,
                    g.length(), o.error, o.agree, o.compared);
    if (!g.greedy.empty()) {
      const bool matters = g.margin > (rounded ? kRoundedMargin : kMargin);
      line += fmt::format("  greedy {}", o.greedy_equal ? "equal"
                                         : matters      ? "DIFFERENT"
                                                        : "different");
      if (!quantised && matters && !o.greedy_equal) ++broken;
      if (!g.mtp.empty()) {
        line += fmt::format("  MTP {}/{}", o.mtp_agree, g.mtp.size());
        if (!quantised && !rounded && o.mtp_agree != static_cast<int64_t>(g.mtp.size())) ++broken;
      }
    }
    if (rounded && !quantised) broken += o.clear_misses;
    fmt::print("{}\n", line);
  }
  const bool rule = quantised && !tolerance;
  const size_t needed = rule ? (goldens.size() * 3 + 3) / 4 : goldens.size();
  const bool pass = within >= needed && (!rule || rounded || worst <= 5e-2) && broken == 0;
  fmt::print("{} of {} within {:.0e} ({} needed), worst {:.2e}{}: {}\n", within, goldens.size(),
             strict, needed, worst,
             broken > 0 ? fmt::format(", {} clear choices differ", broken) : "",
             pass ? "pass" : "FAIL");
  std::fflush(stdout);
  return pass
             ? Status::ok()
             : Status::invalid("the model's answers are not the golden ones (see the lines above)");
}

}  // namespace

Status eval_goldens(GoldensOptions options, const Launch& launch) {
  const bool json = options.file.ends_with(".json");
  ASSIGN_OR_RETURN(const model::Config config, model::load_config(options.run.model));
  if (!std::ifstream(options.file)) {
    return Status::usage(
        fmt::format("{} cannot be read: give the golden file's path", options.file));
  }
  ASSIGN_OR_RETURN(
      const std::vector<Golden> goldens,
      json ? read_json(options.file) : read_safetensors(options.file, config.vocab_size));
  RETURN_IF_ERROR(check_ids(goldens, options.file, config.vocab_size));

  int64_t longest = 0;
  int64_t total = 0;
  bool mtp = false;
  for (const Golden& g : goldens) {
    longest = std::max(longest, g.length());
    total += Sequence::pages(g.length(), options.run.page_size) * options.run.page_size;
    mtp = mtp || !g.mtp.empty();
  }
  RunOptions& run = options.run;
  run.mtp = mtp && config.num_nextn_predict_layers > 0;
  run.context_length = longest;
  run.max_total_tokens = total;
  // One step holds every prompt at once, and a whole continuation as decode rows.
  run.max_dispatch_tokens = longest + static_cast<int64_t>(goldens.size());
  run.chunked_prefill_size = std::max(run.chunked_prefill_size, total);
  run.on_rank_loss = "fail";  // numbers without some experts are not the reference's
  ASSIGN_OR_RETURN(const auto ranks, Ranks::open(run, launch));

  std::vector<Outcome> outcomes;
  Progress progress("goldens", static_cast<int64_t>(goldens.size()), "sequences", run.quiet);
  RETURN_IF_ERROR(ranks->on_each([&](Rank& rank) -> Status {
    auto result = Runner(rank, goldens).run(progress);
    if (!result.is_ok()) return result.status();
    if (rank.index == 0) outcomes = std::move(*result);
    return Status::ok();
  }));
  progress.finish();
  if (!ranks->is_front()) return Status::ok();
  const bool quantised = quantization_name(ranks->config(), ranks->options()) != "bf16";
  const bool rounded = run.device == "cuda" || run.kv_cache_dtype == "bf16";
  return judge(goldens, outcomes, options.tolerance, quantised, rounded);
}

}  // namespace sortie::cli
