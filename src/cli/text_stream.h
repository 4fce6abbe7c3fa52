#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/group.h"
#include "text/detokeniser.h"
#include "text/stop_matcher.h"
#include "text/tokenizer.h"

namespace sortie::cli {

// A piece of a generation as text: what can be shown, and how it ended with the last piece.
struct TextEvent {
  std::string text;
  engine::Event event;  // event.finish: kNone until the last
  bool stopped_by_string = false;
};

// One request's tokens turned into text on the fly, with stop strings. Its sink may be called from
// the rank's thread; next() from the consumer's.
class TextStream : public std::enable_shared_from_this<TextStream> {
 public:
  TextStream(std::shared_ptr<const text::Tokenizer> tokenizer, std::vector<std::string> stop);

  // Submits and returns the stream's request id.
  uint64_t submit(engine::Engine& engine, engine::Request request);
  // Waits for the next piece; the last has a finish reason.
  TextEvent next();
  void cancel();

 private:
  void on_event(const engine::Event& event);

  engine::Engine* engine_ = nullptr;
  const std::shared_ptr<const text::Tokenizer> tokenizer_;  // null: ids alone
  std::optional<text::Detokeniser> detokeniser_;
  text::StopMatcher stop_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<TextEvent> pieces_;
  uint64_t id_ = 0;
};

}  // namespace sortie::cli
