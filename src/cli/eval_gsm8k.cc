#include "cli/eval_gsm8k.h"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/progress.h"
#include "cli/gsm8k.h"
#include "cli/serving.h"
#include "cli/signals.h"
#include "cli/text_stream.h"
#include "text/chat_template.h"

namespace sortie::cli {

namespace {

struct Answer {
  std::string text;
  engine::Event last;
  bool right = false;
};

// Asks every question, `parallel` at a time, each on a thread that waits for its stream.
class Asker {
 public:
  Asker(const Gsm8kOptions& options, const std::vector<Problem>& problems, engine::Engine& engine,
        std::shared_ptr<const text::Tokenizer> tokenizer)
      : options_(options),
        shots_(problems.begin(), problems.begin() + (options.chat ? 0 : options.num_shots)),
        questions_(problems.begin() + options.num_shots, problems.end()),
        engine_(engine),
        tokenizer_(std::move(tokenizer)),
        answers_(questions_.size()) {}

  Status use_template(const std::string& folder) {
    ASSIGN_OR_RETURN(template_, text::ModelTemplates::load(folder));
    return Status::ok();
  }

  const std::vector<Answer>& run(int parallel) {
    Progress progress("gsm8k", static_cast<int64_t>(questions_.size()), "questions",
                      options_.run.quiet);
    std::vector<std::thread> askers;
    askers.reserve(static_cast<size_t>(parallel));
    for (int i = 0; i < parallel; ++i) askers.emplace_back([&] { ask_until_done(progress); });
    for (std::thread& t : askers) t.join();
    return answers_;
  }
  void stop() {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  const Status& status() const { return status_; }

 private:
  void ask_until_done(Progress& progress) {
    for (;;) {
      size_t i = 0;
      {
        const std::lock_guard lock(mutex_);
        if (stopped_ || next_ == questions_.size()) return;
        i = next_++;
      }
      ask(i);
      progress.add(1);
      const std::lock_guard lock(mutex_);
      ++asked_;
      right_ += answers_[i].right ? 1 : 0;
      progress.note(fmt::format("{:.1f} % right", 100.0 * right_ / asked_));
    }
  }

  Result<std::vector<int32_t>> prompt(const std::string& question) const {
    if (!options_.chat) return tokenizer_->encode(few_shot_prompt(shots_, question), true);
    ASSIGN_OR_RETURN(const std::string text,
                     template_->render({{"messages", {{{"role", "user"}, {"content", question}}}},
                                        {"add_generation_prompt", true}}));
    return tokenizer_->encode(text, false);
  }

  void ask(size_t i) {
    Answer& answer = answers_[i];
    const auto ids = prompt(questions_[i].question);
    if (!ids.is_ok()) return fail(ids.status());
    const std::vector<std::string> stop =
        options_.chat ? std::vector<std::string>{} : std::vector<std::string>{"Question"};
    const size_t losses = engine_.losses().size();
    answer = {};
    auto stream = std::make_shared<TextStream>(tokenizer_, stop);
    stream->submit(engine_, {.prompt = *ids, .sampling = options_.sampling});
    do {
      const TextEvent piece = stream->next();
      answer.text += piece.text;
      answer.last = piece.event;
    } while (answer.last.finish == engine::FinishReason::kNone);
    // With --on-rank-loss degrade the rest of the group can still take the question.
    if (answer.last.finish == engine::FinishReason::kRankLost && engine_.losses().size() > losses) {
      return ask(i);
    }
    if (!answer.last.error.empty()) fail(Status::invalid(answer.last.error));
    answer.right = last_number(answer.text) == last_number(questions_[i].answer);
  }

  void fail(const Status& status) {
    const std::lock_guard lock(mutex_);
    if (status_.is_ok()) status_ = status;
    stopped_ = true;
  }

  const Gsm8kOptions& options_;
  const std::vector<Problem> shots_;
  const std::vector<Problem> questions_;
  engine::Engine& engine_;
  const std::shared_ptr<const text::Tokenizer> tokenizer_;
  std::optional<text::ModelTemplates> template_;
  std::vector<Answer> answers_;
  std::mutex mutex_;
  size_t next_ = 0;
  int64_t asked_ = 0;
  int64_t right_ = 0;
  bool stopped_ = false;
  Status status_;
};

Status write_answers(const std::string& path, const std::vector<Problem>& problems, int shots,
                     const std::vector<Answer>& answers) {
  std::ofstream file(path);
  for (size_t i = 0; i < answers.size(); ++i) {
    const nlohmann::ordered_json row = {
        {"question", problems[static_cast<size_t>(shots) + i].question},
        {"expected", problems[static_cast<size_t>(shots) + i].answer},
        {"answer", answers[i].text},
        {"right", answers[i].right},
        {"tokens", answers[i].last.generated_tokens},
        {"degraded", answers[i].last.degraded}};
    file << row.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << '\n';
  }
  file.flush();
  return file ? Status::ok()
              : Status::exhausted(fmt::format("--output {} cannot be written", path));
}

}  // namespace

Status eval_gsm8k(Gsm8kOptions options, const Launch& launch) {
  ASSIGN_OR_RETURN(std::vector<Problem> problems, read_problems(options.data));
  const auto shots = static_cast<size_t>(std::max(0, options.num_shots));
  if (problems.size() <= shots) {
    return Status::usage(
        fmt::format("{} holds {} problems: none is left after {} examples (--num-shots)",
                    options.data, problems.size(), shots));
  }
  if (options.num_questions > 0) {
    problems.resize(std::min(problems.size(), shots + static_cast<size_t>(options.num_questions)));
  }
  ASSIGN_OR_RETURN(const auto tokenizer, text::Tokenizer::load(options.run.model));
  block_signals();
  ASSIGN_OR_RETURN(const auto ranks, Ranks::open(options.run, launch));
  if (!ranks->is_front()) return serve_rank(*ranks, !launch.child);

  Serving serving(*ranks);
  engine::Engine& engine = serving.engine();
  Asker asker(options, problems, engine, tokenizer);
  if (options.chat) RETURN_IF_ERROR(asker.use_template(options.run.model));
  const int capacity = ranks->size() * options.run.max_running_requests;
  const TimePoint start = Clock::now();
  SignalWatch signals([&] {
    asker.stop();
    engine.stop();
  });
  const std::vector<Answer>& answers =
      asker.run(options.parallel > 0 ? options.parallel : capacity);
  const double elapsed = to_seconds(Clock::now() - start);
  const Status joined = serving.finish();
  int64_t preemptions = 0;
  for (const engine::RankStats& r : serving.stats()) preemptions += r.preemptions;
  if (signals.caught() != 0)
    return Status::cancelled("stopped by a signal; no accuracy was computed");
  RETURN_IF_ERROR(joined);
  RETURN_IF_ERROR(asker.status());

  int64_t right = 0;
  int64_t tokens = 0;
  int64_t prompt_tokens = 0;
  int64_t degraded = 0;
  for (const Answer& a : answers) {
    right += a.right ? 1 : 0;
    tokens += a.last.generated_tokens;
    degraded += a.last.degraded ? 1 : 0;
    prompt_tokens += a.last.prompt_tokens;
  }
  if (!options.output.empty()) {
    RETURN_IF_ERROR(write_answers(options.output, problems, options.num_shots, answers));
  }
  const auto total = static_cast<int64_t>(answers.size());
  const Interval interval = wilson(right, total);
  const double accuracy = static_cast<double>(right) / static_cast<double>(total);
  if (options.json) {
    fmt::print("{}\n", nlohmann::ordered_json{{"accuracy", accuracy},
                                              {"right", right},
                                              {"questions", total},
                                              {"degraded", degraded},
                                              {"low", interval.low},
                                              {"high", interval.high},
                                              {"generated_tokens", tokens},
                                              {"prompt_tokens", prompt_tokens},
                                              {"seconds", elapsed}}
                           .dump());
  } else {
    fmt::print("accuracy {:.2f} % ({} of {}), 95 % interval {:.2f} to {:.2f} %\n", 100 * accuracy,
               right, total, 100 * interval.low, 100 * interval.high);
    fmt::print("{} tokens generated in {:.1f} s: {:.0f} tokens/s ({} prompt tokens read)\n", tokens,
               elapsed, static_cast<double>(tokens) / elapsed, prompt_tokens);
    if (preemptions > 0) {
      fmt::print("{} preemptions for want of pages: a larger --max-total-tokens avoids them\n",
                 preemptions);
    }
  }
  fmt::print(stderr, "{}", degraded_note(serving.losses(), degraded, total));
  return Status::ok();
}

}  // namespace sortie::cli
