#include "cli/text_stream.h"

#include <utility>

namespace sortie::cli {

TextStream::TextStream(std::shared_ptr<const text::Tokenizer> tokenizer,
                       std::vector<std::string> stop)
    : tokenizer_(std::move(tokenizer)), stop_(std::move(stop)) {
  if (tokenizer_) detokeniser_.emplace(*tokenizer_, /*skip_special=*/true);
}

uint64_t TextStream::submit(engine::Engine& engine, engine::Request request) {
  engine_ = &engine;
  const uint64_t id =
      engine.submit(std::move(request),
                    [self = shared_from_this()](const engine::Event& e) { self->on_event(e); });
  const std::lock_guard lock(mutex_);
  return id_ = id;
}

void TextStream::cancel() {
  uint64_t id = 0;
  {
    const std::lock_guard lock(mutex_);
    id = id_;
  }
  if (id != 0) engine_->cancel(id);
}

void TextStream::on_event(const engine::Event& event) {
  const bool last = event.finish != engine::FinishReason::kNone;
  const std::lock_guard lock(mutex_);
  TextEvent piece{.event = event};
  if (detokeniser_ && stop_.matched() < 0) {
    if (event.token >= 0) piece.text = stop_.push(detokeniser_->push(event.token));
    if (last) piece.text += stop_.push(detokeniser_->finish());
    if (last && stop_.matched() < 0) piece.text += stop_.finish();
    if (stop_.matched() >= 0 && !last) engine_->cancel(event.request);
  }
  piece.stopped_by_string = stop_.matched() >= 0;
  if (piece.stopped_by_string && event.finish == engine::FinishReason::kCancelled) {
    piece.event.finish = engine::FinishReason::kStop;
  }
  pieces_.push_back(std::move(piece));
  changed_.notify_one();
}

TextEvent TextStream::next() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !pieces_.empty(); });
  TextEvent piece = std::move(pieces_.front());
  pieces_.pop_front();
  return piece;
}

}  // namespace sortie::cli
