#include "engine/scheduler.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace sortie::engine {

namespace {

// What no sampler can do anything with; empty if all is well.
std::string bad_sampling(const SamplingParams& p, int64_t vocab_size) {
  if (p.max_new_tokens < 0)
    return fmt::format("max_new_tokens is {}: use 0 or more", p.max_new_tokens);
  if (!std::isfinite(p.temperature) || p.temperature < 0)
    return fmt::format("temperature is {}: use 0 (greedy) or more", p.temperature);
  if (!(p.top_p > 0 && p.top_p <= 1))
    return fmt::format("top_p is {}: use more than 0 and at most 1", p.top_p);
  if (p.top_k < -1) return fmt::format("top_k is {}: use -1 or 0 (all) or more", p.top_k);
  if (!(p.min_p >= 0 && p.min_p <= 1)) return fmt::format("min_p is {}: use 0 to 1", p.min_p);
  if (!std::isfinite(p.repetition_penalty) || p.repetition_penalty <= 0)
    return fmt::format("repetition_penalty is {}: use more than 0", p.repetition_penalty);
  if (!std::isfinite(p.presence_penalty) || !std::isfinite(p.frequency_penalty))
    return "presence_penalty and frequency_penalty must be finite numbers";
  if (p.top_logprobs < 0 || p.top_logprobs > vocab_size)
    return fmt::format("top_logprobs is {}: use 0 to {}", p.top_logprobs, vocab_size);
  return {};
}

bool contains(const std::vector<int32_t>& ids, int32_t id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

}  // namespace

Scheduler::Scheduler(SchedulerOptions options, Sink sink)
    : options_(std::move(options)), sink_(std::move(sink)), pool_(options_.pages) {
  CHECK(options_.max_running_requests > 0 && options_.chunked_prefill_size > 0);
  CHECK(options_.max_step_rows >= options_.max_running_requests);
  CHECK(options_.page_size > 0);
}

std::string Scheduler::refusal(const Request& request) const {
  const auto tokens = static_cast<int64_t>(request.prompt.size());
  if (tokens == 0) return "the prompt has no tokens: give at least one";
  if (tokens + 1 > options_.context_length)
    return fmt::format(
        "the prompt has {} tokens, but with --context-length {} it may have {}: shorten it or "
        "raise "
        "--context-length",
        tokens, options_.context_length, options_.context_length - 1);
  if (const int64_t needed = kv::pages_for(tokens, options_.page_size); needed > options_.pages)
    return fmt::format(
        "the prompt has {} tokens and needs {} cache pages of {}, but a rank has {}: shorten it or "
        "give the cache more memory",
        tokens, needed, options_.page_size, options_.pages);
  for (int64_t i = 0; i < tokens; ++i) {
    const int32_t id = request.prompt[static_cast<size_t>(i)];
    if (id < 0 || id >= options_.vocab_size)
      return fmt::format("token {} of the prompt is {}, but ids go from 0 to {}", i, id,
                         options_.vocab_size - 1);
  }
  return bad_sampling(request.sampling, options_.vocab_size);
}

void Scheduler::submit(Request request) {
  auto sequence = std::make_unique<Sequence>();
  sequence->request = std::move(request);
  Request& r = sequence->request;
  if (std::string why = refusal(r); !why.empty()) {
    sink_({.request = r.id,
           .finish = FinishReason::kError,
           .error = std::move(why),
           .prompt_tokens = static_cast<int64_t>(r.prompt.size())});
    return;
  }
  sequence->tokens = std::move(r.prompt);
  sequence->prompt_tokens = sequence->length();
  // The last token's latent is never needed, hence one more than the pages hold.
  const int64_t room = std::min(options_.context_length, options_.pages * options_.page_size + 1);
  sequence->max_new_tokens = std::min(r.sampling.max_new_tokens, room - sequence->prompt_tokens);
  if (sequence->max_new_tokens == 0) {
    end(*sequence, {.finish = FinishReason::kLength});
    return;
  }
  sequence->tokens.reserve(static_cast<size_t>(sequence->prompt_tokens + sequence->max_new_tokens));
  waiting_.push_back(std::move(sequence));
}

void Scheduler::cancel(uint64_t request) {
  const auto is_it = [&](const SequencePtr& s) { return s->request.id == request; };
  const auto cancel_in = [&](auto& queue) {
    const auto it = std::find_if(queue.begin(), queue.end(), is_it);
    if (it == queue.end()) return false;
    const SequencePtr sequence = std::move(*it);
    queue.erase(it);
    end(*sequence, {.finish = FinishReason::kCancelled});
    return true;
  };
  if (!cancel_in(running_)) cancel_in(waiting_);
}

void Scheduler::end_all(FinishReason reason, const std::string& error) {
  for (SequencePtr& s : running_) end(*s, {.finish = reason, .error = error});
  for (SequencePtr& s : waiting_) end(*s, {.finish = reason, .error = error});
  running_.clear();
  waiting_.clear();
}

void Scheduler::end(Sequence& sequence, Event event) {
  sequence.pages.release(pool_);
  event.request = sequence.request.id;
  event.degraded = sequence.degraded;
  event.prompt_tokens = sequence.prompt_tokens;
  event.generated_tokens = sequence.generated();
  sink_(event);
}

Scheduler::Plan& Scheduler::plan() {
  const int64_t preempted_before = preemptions_;
  // Requests that are up to date come first: each gets its row.
  int64_t decode_rows = 0;
  for (size_t i = 0; i < running_.size(); ++i) {
    running_[i]->planned = 0;
    if (running_[i]->behind() == 1 && running_[i]->generated() > 0) make_room(i);
  }
  // A preemption above took requests off the end of running_ alone.
  for (SequencePtr& s : running_) {
    if (s->behind() == 1 && s->generated() > 0) {
      s->planned = 1;
      ++decode_rows;
    }
  }
  // A request that was just preempted would only take the pages back.
  if (preemptions_ == preempted_before) admit();
  // The rest of the step goes to those that are behind, a prompt's rows and recomputed output rows
  // alike, first come first served.
  int64_t budget = std::min(options_.chunked_prefill_size, options_.max_step_rows - decode_rows);
  plan_.decode_rows = static_cast<int32_t>(decode_rows);
  plan_.prefill_rows = 0;
  for (SequencePtr& s : running_) {
    if (s->planned > 0 || budget == 0) continue;
    const bool prefill = s->computed < s->prompt_tokens;
    s->planned = std::min(budget, (prefill ? s->prompt_tokens : s->length()) - s->computed);
    budget -= s->planned;
    plan_.prefill_rows += static_cast<int32_t>(s->planned);
  }
  lay_out();
  return plan_;
}

// Gives running_[index] the page for its next row, preempting from the end of running_ if need be,
// itself included.
void Scheduler::make_room(size_t index) {
  Sequence& s = *running_[index];
  while (!s.pages.grow(pool_, s.computed + 1, options_.page_size)) {
    const bool itself = running_.size() == index + 1;
    preempt_last();
    if (itself) return;
  }
}

void Scheduler::preempt_last() {
  // A request alone always fits: submit has cut it to the pool.
  CHECK(running_.size() > 1, "a single request outgrew the page pool");
  SequencePtr s = std::move(running_.back());
  running_.pop_back();
  s->pages.release(pool_);
  s->computed = 0;
  s->planned = 0;
  ++preemptions_;
  waiting_.push_front(std::move(s));
}

void Scheduler::admit() {
  while (!waiting_.empty() &&
         running_.size() < static_cast<size_t>(options_.max_running_requests)) {
    Sequence& s = *waiting_.front();
    // A page in hand for each running request: otherwise the newcomer is soon preempted by their
    // next page and its prefill was for nothing.
    const int64_t needed =
        kv::pages_for(s.length(), options_.page_size) + static_cast<int64_t>(running_.size());
    if (!running_.empty() && needed > pool_.free_pages()) return;
    const bool grown = s.pages.grow(pool_, s.length(), options_.page_size);
    CHECK(grown, "a request fits an empty pool");
    running_.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
  }
}

// Turns each request's planned rows into the model's step.
void Scheduler::lay_out() {
  model::Step& step = plan_.step;
  step.clear();
  plan_.targets.clear();
  for (const SequencePtr& s : running_) {
    if (s->planned == 0) continue;
    const auto first = static_cast<int64_t>(step.ids.size());
    step.segments.push_back({.first_row = first,
                             .rows = s->planned,
                             .prefill = s->computed < s->prompt_tokens,
                             .page_table = s->pages.data()});
    for (int64_t i = 0; i < s->planned; ++i) {
      step.ids.push_back(s->tokens[static_cast<size_t>(s->computed + i)]);
      step.positions.push_back(static_cast<int32_t>(s->computed + i));
    }
    if (s->planned == s->behind()) {
      step.logit_rows.push_back(static_cast<int32_t>(first + s->planned - 1));
      plan_.targets.push_back({&s->request.sampling, s->tokens, s->prompt_tokens});
    }
  }
}

void Scheduler::apply(std::span<const Sampled> sampled, bool degraded) {
  CHECK(sampled.size() == plan_.targets.size());
  size_t next = 0;
  size_t kept = 0;
  for (SequencePtr& s : running_) {
    const bool up_to_date = s->planned > 0 && s->planned == s->behind();
    s->degraded |= degraded && s->planned > 0;
    s->computed += std::exchange(s->planned, 0);
    if (up_to_date && !accept(*s, sampled[next++])) continue;
    if (SequencePtr& place = running_[kept++]; place != s) place = std::move(s);
  }
  running_.resize(kept);
}

// Emits the token and ends the request if it was its last; true if it goes on.
bool Scheduler::accept(Sequence& s, const Sampled& sampled) {
  const SamplingParams& p = s.request.sampling;
  s.tokens.push_back(sampled.id);
  Event event{.request = s.request.id,
              .token = sampled.id,
              .logprob = sampled.logprob,
              .degraded = s.degraded};
  event.top = sampled.top;
  if (contains(p.stop_token_ids, sampled.id) ||
      (!p.ignore_eos && contains(options_.eos_token_ids, sampled.id))) {
    event.token = -1;
    event.matched_stop = sampled.id;
    event.finish = FinishReason::kStop;
    end(s, std::move(event));
    return false;
  }
  sink_(event);
  if (s.generated() < s.max_new_tokens) return true;
  end(s, {.finish = FinishReason::kLength});
  return false;
}

}  // namespace sortie::engine
