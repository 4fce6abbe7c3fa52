#include "engine/wire.h"

#include <gtest/gtest.h>

#include <random>

namespace sortie::engine {
namespace {

Request some_request() {
  return {.id = 0x1122334455667788,
          .prompt = {1, -2, 3000000},
          .sampling = {.max_new_tokens = 77,
                       .temperature = 0.5F,
                       .top_p = 0.9F,
                       .top_k = -1,
                       .min_p = 0.01F,
                       .repetition_penalty = 1.1F,
                       .presence_penalty = -0.5F,
                       .frequency_penalty = 0.25F,
                       .seed = 1ULL << 63,
                       .choice = 4,
                       .ignore_eos = true,
                       .stop_token_ids = {5, 6},
                       .logprobs = true,
                       .top_logprobs = 3},
          .rank = 1};
}

Event some_event() {
  return {.request = 9,
          .token = 12,
          .logprob = -0.25F,
          .top = {{12, -0.25F}, {13, -2}},
          .finish = FinishReason::kRankLost,
          .matched_stop = 3,
          .error = "rank 1 is gone",
          .prompt_tokens = 100,
          .generated_tokens = 20};
}

RankStats some_stats() {
  RankStats s{.steps = 1,
              .prompt_tokens = 2,
              .generated_tokens = 3,
              .preemptions = 4,
              .prefill_seconds = 5.5,
              .decode_seconds = 6.5};
  s.times.seconds[2] = 7.5;
  s.times.steps = 8;
  return s;
}

std::vector<Message> all_messages() {
  return {some_request(), CancelMessage{42}, StopMessage{},
          some_event(),   some_stats(),      LeftMessage{Status::rank_lost("rank 1 is gone")},
          Request{},      Event{},           LeftMessage{}};
}

template <typename T>
T round_trip(const T& message) {
  Result<Message> back = decode(encode(message));
  EXPECT_TRUE(back.is_ok()) << back.status().message();
  EXPECT_TRUE(std::holds_alternative<T>(*back));
  return std::get<T>(*back);
}

TEST(Wire, BringsEveryFieldBack) {
  const Request in = some_request();
  const Request r = round_trip(in);
  EXPECT_EQ(r.id, in.id);
  EXPECT_EQ(r.prompt, in.prompt);
  EXPECT_EQ(r.rank, 1);
  EXPECT_EQ(r.sampling.max_new_tokens, 77);
  EXPECT_EQ(r.sampling.temperature, 0.5F);
  EXPECT_EQ(r.sampling.top_p, 0.9F);
  EXPECT_EQ(r.sampling.top_k, -1);
  EXPECT_EQ(r.sampling.min_p, 0.01F);
  EXPECT_EQ(r.sampling.repetition_penalty, 1.1F);
  EXPECT_EQ(r.sampling.presence_penalty, -0.5F);
  EXPECT_EQ(r.sampling.frequency_penalty, 0.25F);
  EXPECT_EQ(r.sampling.seed, 1ULL << 63);
  EXPECT_EQ(r.sampling.choice, 4u);
  EXPECT_TRUE(r.sampling.ignore_eos);
  EXPECT_EQ(r.sampling.stop_token_ids, in.sampling.stop_token_ids);
  EXPECT_TRUE(r.sampling.logprobs);
  EXPECT_EQ(r.sampling.top_logprobs, 3);

  const Event e = round_trip(some_event());
  EXPECT_EQ(e.request, 9u);
  EXPECT_EQ(e.token, 12);
  EXPECT_EQ(e.logprob, -0.25F);
  ASSERT_EQ(e.top.size(), 2u);
  EXPECT_EQ(e.top[1].id, 13);
  EXPECT_EQ(e.top[1].logprob, -2.0F);
  EXPECT_EQ(e.finish, FinishReason::kRankLost);
  EXPECT_EQ(e.matched_stop, 3);
  EXPECT_EQ(e.error, "rank 1 is gone");
  EXPECT_EQ(e.prompt_tokens, 100);
  EXPECT_EQ(e.generated_tokens, 20);

  const RankStats s = round_trip(some_stats());
  EXPECT_EQ(s.steps, 1);
  EXPECT_EQ(s.prompt_tokens, 2);
  EXPECT_EQ(s.generated_tokens, 3);
  EXPECT_EQ(s.preemptions, 4);
  EXPECT_EQ(s.prefill_seconds, 5.5);
  EXPECT_EQ(s.decode_seconds, 6.5);
  EXPECT_EQ(s.times.seconds[2], 7.5);
  EXPECT_EQ(s.times.steps, 8);

  EXPECT_EQ(round_trip(CancelMessage{42}).request, 42u);
  round_trip(StopMessage{});
  const LeftMessage left = round_trip(LeftMessage{Status::rank_lost("rank 1 is gone")});
  EXPECT_EQ(left.status.code(), StatusCode::kRankLost);
  EXPECT_EQ(left.status.message(), "rank 1 is gone");
  EXPECT_TRUE(round_trip(LeftMessage{}).status.is_ok());
}

TEST(Wire, RefusesFramesThatAreCutOrTooLong) {
  for (const Message& message : all_messages()) {
    std::vector<std::byte> frame = encode(message);
    for (size_t n = 0; n < frame.size(); ++n) {
      EXPECT_FALSE(decode({frame.data(), n}).is_ok()) << message.index() << " cut to " << n;
    }
    frame.push_back(std::byte{0});
    EXPECT_FALSE(decode(frame).is_ok()) << message.index();
  }
}

TEST(Wire, RefusesUnknownKindsAndValuesOutsideTheirEnums) {
  for (int kind = std::variant_size_v<Message>; kind < 256; ++kind) {
    const std::vector<std::byte> frame(64, static_cast<std::byte>(kind));
    EXPECT_FALSE(decode(frame).is_ok()) << kind;
  }
  std::vector<std::byte> event = encode(Event{});
  const size_t finish = 1 + 8 + 4 + 4 + 4;  // kind, request, token, logprob, count of top
  ASSERT_EQ(event[finish], std::byte{0});
  event[finish] = std::byte{6};
  EXPECT_FALSE(decode(event).is_ok());
  std::vector<std::byte> left = encode(LeftMessage{});
  left[1] = std::byte{7};
  EXPECT_FALSE(decode(left).is_ok());
}

TEST(Wire, AListThatClaimsMoreThanTheFrameIsRefusedBeforeItIsMade) {
  std::vector<std::byte> frame = encode(Request{});
  for (int i = 0; i < 4; ++i) frame[9 + i] = std::byte{0xff};  // the prompt's length
  EXPECT_FALSE(decode(frame).is_ok());
}

// Whatever arrives, decoding ends with a message that encodes to the same bytes, or an error.
TEST(Wire, SurvivesRandomFrames) {
  std::mt19937 random(11);
  for (const Message& message : all_messages()) {
    const std::vector<std::byte> good = encode(message);
    for (int i = 0; i < 3000; ++i) {
      std::vector<std::byte> frame = good;
      for (int flips = 1 + static_cast<int>(random() % 4); flips > 0; --flips) {
        frame[random() % frame.size()] = static_cast<std::byte>(random());
      }
      const Result<Message> back = decode(frame);
      if (back.is_ok()) {
        EXPECT_EQ(encode(*back), frame);
      }
    }
  }
}

}  // namespace
}  // namespace sortie::engine
