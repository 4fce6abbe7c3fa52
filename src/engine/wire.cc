#include "engine/wire.h"

#include <bit>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

namespace sortie::engine {

namespace {

static_assert(std::endian::native == std::endian::little,
              "frames are copied as they lie in memory");

// One list of fields serves both directions: `fields(io, x)` calls io(field) for each.
template <typename Io, typename T>
concept SameButConst = std::is_same_v<std::remove_const_t<Io>, T>;

template <typename S, SameButConst<SamplingParams> T>
void fields(S& io, T& p) {
  io(p.max_new_tokens), io(p.temperature), io(p.top_p), io(p.top_k), io(p.min_p);
  io(p.repetition_penalty), io(p.presence_penalty), io(p.frequency_penalty);
  io(p.seed), io(p.choice), io(p.ignore_eos), io(p.stop_token_ids), io(p.logprobs);
  io(p.top_logprobs);
}
template <typename S, SameButConst<Request> T>
void fields(S& io, T& r) {
  io(r.id), io(r.prompt), fields(io, r.sampling), io(r.rank);
}
template <typename S, SameButConst<CancelMessage> T>
void fields(S& io, T& c) {
  io(c.request);
}
template <typename S, SameButConst<StopMessage> T>
void fields(S&, T&) {}
template <typename S, SameButConst<Event> T>
void fields(S& io, T& e) {
  io(e.request), io(e.token), io(e.logprob), io(e.top), io.limited(e.finish, FinishReason::kError);
  io(e.matched_stop), io(e.error), io(e.degraded), io(e.prompt_tokens), io(e.generated_tokens);
}
template <typename S, SameButConst<RankStats> T>
void fields(S& io, T& s) {
  io(s.steps), io(s.prompt_tokens), io(s.generated_tokens), io(s.preemptions);
  io(s.prefill_seconds), io(s.decode_seconds);
  for (auto& seconds : s.times.seconds) io(seconds);
  io(s.times.steps);
}

class Writer {
 public:
  template <typename T>
  requires std::is_arithmetic_v<T>
  void operator()(const T& value) { append(&value, sizeof value); }
  template <typename T>
  void operator()(const std::vector<T>& list) {
    static_assert(std::is_same_v<T, int32_t> || std::is_same_v<T, TokenLogprob>);  // no padding
    (*this)(static_cast<uint32_t>(list.size()));
    append(list.data(), list.size() * sizeof(T));
  }
  void operator()(const std::string& text) {
    (*this)(static_cast<uint32_t>(text.size()));
    append(text.data(), text.size());
  }
  template <typename E>
  void limited(const E& value, E /*largest*/) {
    (*this)(static_cast<uint8_t>(value));
  }
  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  void append(const void* data, size_t size) {
    if (size == 0) return;
    const auto* p = static_cast<const std::byte*>(data);
    bytes_.insert(bytes_.end(), p, p + size);
  }
  std::vector<std::byte> bytes_;
};

// After the first field that does not fit, reads nothing more and says so in ok().
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <typename T>
  requires std::is_arithmetic_v<T>
  void operator()(T& value) {
    if constexpr (std::is_same_v<T, bool>) {
      uint8_t byte = 0;
      (*this)(byte);
      if (byte > 1) ok_ = false;
      value = byte == 1;
    } else {
      extract(&value, sizeof value);
    }
  }
  template <typename T>
  void operator()(std::vector<T>& list) {
    const size_t count = this->count(sizeof(T));
    list.resize(count);
    extract(list.data(), count * sizeof(T));
  }
  void operator()(std::string& text) {
    const size_t count = this->count(1);
    text.resize(count);
    extract(text.data(), count);
  }
  template <typename E>
  void limited(E& value, E largest) {
    uint8_t byte = 0;
    (*this)(byte);
    if (byte > static_cast<uint8_t>(largest)) ok_ = false;
    if (ok_) value = static_cast<E>(byte);
  }
  bool ok() const { return ok_; }
  bool at_end() const { return bytes_.empty(); }

 private:
  // A list's length, 0 if the frame does not hold as much.
  size_t count(size_t element_size) {
    uint32_t n = 0;
    (*this)(n);
    if (n > bytes_.size() / element_size) ok_ = false;
    return ok_ ? n : 0;
  }
  void extract(void* data, size_t size) {
    if (size > bytes_.size()) ok_ = false;
    if (!ok_ || size == 0) return;
    std::memcpy(data, bytes_.data(), size);
    bytes_ = bytes_.subspan(size);
  }
  std::span<const std::byte> bytes_;
  bool ok_ = true;
};

template <typename S, SameButConst<LeftMessage> T>
void fields(S& io, T& left) {
  StatusCode code = left.status.code();
  std::string message = left.status.message();
  io.limited(code, StatusCode::kInternal);
  io(message);
  if constexpr (!std::is_const_v<T>) left.status = Status(code, std::move(message));
}

template <typename T>
Result<Message> decode_as(Reader& reader) {
  T message{};
  fields(reader, message);
  if (!reader.ok() || !reader.at_end())
    return Status::invalid("a control frame between the ranks is malformed");
  return Message(std::move(message));
}

template <size_t... I>
Result<Message> decode_kind(uint8_t kind, Reader& reader, std::index_sequence<I...> /*kinds*/) {
  Result<Message> result = Status::invalid("a control frame between the ranks has an unknown kind");
  ((kind == I ? void(result = decode_as<std::variant_alternative_t<I, Message>>(reader)) : void()),
   ...);
  return result;
}

}  // namespace

std::vector<std::byte> encode(const Message& message) {
  Writer writer;
  writer(static_cast<uint8_t>(message.index()));
  std::visit([&](const auto& m) { fields(writer, m); }, message);
  return writer.take();
}

Result<Message> decode(std::span<const std::byte> frame) {
  Reader reader(frame);
  uint8_t kind = UINT8_MAX;
  reader(kind);
  return decode_kind(kind, reader, std::make_index_sequence<std::variant_size_v<Message>>());
}

}  // namespace sortie::engine
