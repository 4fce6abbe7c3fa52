#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sortie::engine {

// Named and defaulted as SGLang's; temperature 0 = greedy.
struct SamplingParams {
  int64_t max_new_tokens = 128;
  float temperature = 0;
  float top_p = 1;
  int top_k = 0;  // 0 or -1 = all
  float min_p = 0;
  float repetition_penalty = 1;
  float presence_penalty = 0;
  float frequency_penalty = 0;
  uint64_t seed = 0;
  uint32_t choice = 0;  // which of n choices: part of the noise's key
  bool ignore_eos = false;
  std::vector<int32_t> stop_token_ids;
  bool logprobs = false;  // of the sampled tokens
  int top_logprobs = 0;
};

struct Request {
  uint64_t id = 0;  // chosen by submit
  std::vector<int32_t> prompt;
  SamplingParams sampling;
  int rank = -1;  // serve on this rank; -1 = the least loaded
};

enum class FinishReason : uint8_t { kNone, kStop, kLength, kCancelled, kRankLost, kError };

struct TokenLogprob {
  int32_t id = -1;
  float logprob = 0;
};

// What a request's stream carries: tokens one by one, then exactly one event with a reason.
struct Event {
  uint64_t request = 0;
  int32_t token = -1;  // -1: none in this event
  float logprob = 0;
  std::vector<TokenLogprob> top;
  FinishReason finish = FinishReason::kNone;
  int32_t matched_stop = -1;  // the eos or stop token that ended it
  std::string error;          // kRankLost, kError: the sentence
  // A step of this request so far ran without the experts of a lost rank (--on-rank-loss degrade).
  bool degraded = false;
  int64_t prompt_tokens = 0;  // with the last event
  int64_t generated_tokens = 0;
};

}  // namespace sortie::engine
