#include "cli/run.h"

#include <fmt/format.h>
#include <unistd.h>

#include <iostream>
#include <nlohmann/json.hpp>

#include "cli/bandwidth.h"
#include "cli/profile.h"
#include "cli/serving.h"
#include "cli/signals.h"
#include "cli/text_stream.h"
#include "model/plan.h"
#include "text/chat_template.h"

namespace sortie::cli {

namespace {

using engine::Event;
using engine::FinishReason;

// The rest of a message after its reasoning, as templates expect earlier turns to be.
std::string without_reasoning(const std::string& reply) {
  constexpr std::string_view kEnd = "</think>";
  const size_t at = reply.rfind(kEnd);
  return at == std::string::npos ? reply : reply.substr(at + kEnd.size());
}

class Generator {
 public:
  Generator(const GenerateOptions& options, Ranks& ranks) : options_(options), ranks_(ranks) {}

  Status prepare() {
    if (!options_.ids.empty()) return Status::ok();
    ASSIGN_OR_RETURN(tokenizer_, text::Tokenizer::load(options_.run.model));
    if (options_.chat) {
      ASSIGN_OR_RETURN(template_, text::ModelTemplates::load(options_.run.model));
      if (!options_.system.empty()) say("system", options_.system);
    }
    return Status::ok();
  }

  Status run() {
    serving_ = std::make_unique<Serving>(ranks_);
    signals_ = std::make_unique<SignalWatch>([this] { serving_->engine().stop(); });
    const Status status = options_.chat && !options_.has_prompt ? converse() : answer_once();
    Status finished = serving_->finish();
    if (signals_->caught() != 0) return Status::cancelled("stopped by a signal");
    std::cerr << degraded_note(serving_->losses(), degraded_, answers_) << std::flush;
    RETURN_IF_ERROR(status);
    if (options_.stats) print_stats(serving_->stats());
    RETURN_IF_ERROR(write_profile(options_.run.profile, serving_->timelines()));
    return finished;
  }

 private:
  void say(const char* role, const std::string& content) {
    messages_.push_back({{"role", role}, {"content", content}});
  }

  Status answer_once() {
    if (!options_.ids.empty()) return generate(options_.ids).status();
    if (options_.chat) return reply(options_.prompt);
    ASSIGN_OR_RETURN(const std::vector<int32_t> ids, tokenizer_->encode(options_.prompt, true));
    return generate(ids).status();
  }

  // One turn of the conversation.
  Status reply(const std::string& content) {
    say("user", content);
    ASSIGN_OR_RETURN(const std::string text,
                     template_->render({{"messages", messages_}, {"add_generation_prompt", true}}));
    ASSIGN_OR_RETURN(const std::vector<int32_t> ids, tokenizer_->encode(text, false));
    ASSIGN_OR_RETURN(const std::string answer, generate(ids));
    say("assistant", without_reasoning(answer));
    return Status::ok();
  }

  Status converse() {
    const bool terminal = isatty(STDIN_FILENO) != 0;
    std::string line;
    for (;;) {
      if (terminal) std::cerr << "> " << std::flush;
      if (!std::getline(std::cin, line) || signals_->caught() != 0) return Status::ok();
      if (line.empty()) continue;
      RETURN_IF_ERROR(reply(line));
    }
  }

  Result<std::string> generate(const std::vector<int32_t>& prompt) {
    const TimePoint start = Clock::now();
    auto stream = std::make_shared<TextStream>(tokenizer_, options_.stop);
    stream->submit(serving_->engine(), {.prompt = prompt, .sampling = options_.sampling});
    std::string answer;
    for (;;) {
      const TextEvent piece = stream->next();
      answer += piece.text;
      print(piece);
      if (piece.event.token >= 0 && first_token_ == TimePoint{}) first_token_ = Clock::now();
      if (piece.event.finish == FinishReason::kNone) continue;
      if (piece.event.error.empty() || !answer.empty()) std::cout << '\n' << std::flush;
      last_ = piece.event;
      ++answers_;
      degraded_ += last_.degraded ? 1 : 0;
      to_first_ = to_seconds(first_token_ - start);
      after_first_ = to_seconds(Clock::now() - first_token_);
      break;
    }
    if (!last_.error.empty()) {
      return Status(
          last_.finish == FinishReason::kRankLost ? StatusCode::kRankLost : StatusCode::kInvalid,
          last_.error);
    }
    return answer;
  }

  void print(const TextEvent& piece) const {
    if (piece.event.token < 0 && piece.text.empty()) return;
    if (options_.sampling.logprobs) {
      std::cout << fmt::format("{}\t{:.9g}\t{}", piece.event.token, piece.event.logprob,
                               nlohmann::json(piece.text)
                                   .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
      for (const engine::TokenLogprob& t : piece.event.top) {
        std::cout << fmt::format("\t{}:{:.9g}", t.id, t.logprob);
      }
      std::cout << std::endl;
    } else if (options_.print_ids) {
      std::cout << piece.event.token << ' ' << std::flush;
    } else {
      std::cout << piece.text << std::flush;
    }
  }

  // Speed against what reading the weights once a token allows, and where the time went.
  void print_stats(const std::vector<engine::RankStats>& stats) const {
    const double read_gbs = measure_read_bandwidth(ranks_.options().threads * ranks_.size());
    const RunOptions& o = ranks_.options();
    const auto formats = formats_of(ranks_.config(), o);
    const model::MemoryPlan plan = model::memory_plan(ranks_.config(), formats);
    const double decoded = static_cast<double>(std::max<int64_t>(0, last_.generated_tokens - 1));
    const double rate = after_first_ > 0 ? decoded / after_first_ : 0;
    const double bound = read_gbs * 1e9 / static_cast<double>(plan.bytes_per_token);
    std::cerr << fmt::format(
        "\nprompt    {} tokens, first token after {:.3f} s\n"
        "decode    {} tokens, {:.1f} tokens/s = {:.1f} % of the bound {:.1f} "
        "({:.2f} MiB a token at {:.1f} GB/s read)\n",
        last_.prompt_tokens, to_first_, last_.generated_tokens, rate, 100 * rate / bound, bound,
        static_cast<double>(plan.bytes_per_token) / 1048576.0, read_gbs);
    std::cerr << "\na step's time, ms";
    for (int p = 0; p < model::StepTimes::kParts; ++p) {
      std::cerr << fmt::format("{:>10}",
                               model::StepTimes::name(static_cast<model::StepTimes::Part>(p)));
    }
    std::cerr << "       sum\n";
    int rank = 0;
    for (const engine::RankStats& s : stats) {
      std::cerr << fmt::format("rank {} ({:5} st.)", rank++, s.times.steps);
      double sum = 0;
      for (const double t : s.times.seconds) {
        const double ms = 1e3 * t / static_cast<double>(std::max<int64_t>(1, s.times.steps));
        sum += ms;
        std::cerr << fmt::format("{:10.3f}", ms);
      }
      std::cerr << fmt::format("{:10.3f}\n", sum);
    }
  }

  const GenerateOptions& options_;
  Ranks& ranks_;
  std::shared_ptr<const text::Tokenizer> tokenizer_;
  std::optional<text::ModelTemplates> template_;
  nlohmann::ordered_json messages_ = nlohmann::ordered_json::array();
  std::unique_ptr<Serving> serving_;
  std::unique_ptr<SignalWatch> signals_;
  TimePoint first_token_{};
  int64_t answers_ = 0;
  int64_t degraded_ = 0;
  double to_first_ = 0;
  double after_first_ = 0;
  Event last_;
};

}  // namespace

Status run_command(GenerateOptions options, const Launch& launch) {
  if (!options.has_prompt && options.ids.empty() && !options.chat) {
    return Status::usage(
        "run needs a prompt: give -p \"…\", --ids 1,2,3, or --chat for a conversation");
  }
  if (!options.ids.empty()) options.print_ids = true;
  if (options.sampling.top_logprobs > 0) options.sampling.logprobs = true;
  block_signals();
  const bool first = !launch.child && options.run.node_rank <= 0;
  if (first) RETURN_IF_ERROR(check_profile(options.run.profile));
  ASSIGN_OR_RETURN(const auto ranks, Ranks::open(options.run, launch));
  if (!ranks->is_front()) return serve_rank(*ranks, !launch.child);
  if (!options.run.quiet) {
    for (const auto& [name, text] : ranks->plan())
      std::cerr << fmt::format("{:<9} {}\n", name, text);
  }
  Generator generator(options, *ranks);
  RETURN_IF_ERROR(generator.prepare());
  return generator.run();
}

}  // namespace sortie::cli
