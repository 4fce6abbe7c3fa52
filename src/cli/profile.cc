#include "cli/profile.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <type_traits>
#include <utility>

#include "base/log.h"

namespace sortie::cli {

using model::StepTimes;
using Event = model::Timeline::Event;

namespace {

struct Header {
  int64_t to_front_ns;
  int64_t dropped;
};
static_assert(std::is_trivially_copyable_v<Event>);

Status unwritable(const std::string& path) {
  return Status::usage(
      fmt::format("--profile {} cannot be written: {}", path, std::strerror(errno)));
}

double us(int64_t ns) { return static_cast<double>(ns) / 1000; }

std::string event_json(const RankTimeline& t, const Event& e, int64_t zero) {
  const bool step = e.part == StepTimes::kParts;
  std::string args = fmt::format(R"("step":{})", e.step);
  if (step) {
    args += fmt::format(R"(,"rows":{})", e.what);
  } else if (e.what >= 0) {
    args += fmt::format(R"(,"layer":{})", e.what);
  }
  return fmt::format(
      R"({{"name":"{}","ph":"X","pid":{},"tid":0,"ts":{:.3f},"dur":{:.3f},"args":{{{}}}}})",
      step ? "step" : StepTimes::name(e.part), t.rank, us(e.begin + t.to_front_ns - zero),
      us(e.end - e.begin), args);
}

}  // namespace

RankTimeline timeline_of(int rank, const model::Timeline& timeline, int64_t to_front_ns) {
  return {rank, to_front_ns, timeline.dropped(), timeline.events()};
}

std::vector<std::byte> encode_timeline(const RankTimeline& t) {
  const Header header{t.to_front_ns, t.dropped};
  const size_t events = t.events.size() * sizeof(Event);
  std::vector<std::byte> message(sizeof header + events);
  std::memcpy(message.data(), &header, sizeof header);
  if (events > 0) std::memcpy(message.data() + sizeof header, t.events.data(), events);
  return message;
}

RankTimeline decode_timeline(int rank, std::span<const std::byte> message) {
  RankTimeline t{.rank = rank};
  Header header{};
  if (message.size() < sizeof header || (message.size() - sizeof header) % sizeof(Event) != 0) {
    return t;
  }
  std::memcpy(&header, message.data(), sizeof header);
  t.to_front_ns = header.to_front_ns;
  t.dropped = header.dropped;
  const std::span<const std::byte> rest = message.subspan(sizeof header);
  t.events.resize(rest.size() / sizeof(Event));
  if (!rest.empty()) std::memcpy(t.events.data(), rest.data(), rest.size());
  std::erase_if(t.events, [](const Event& e) { return e.part > StepTimes::kParts; });
  return t;
}

void TimelineInbox::put(RankTimeline&& timeline) {
  const std::lock_guard lock(mutex_);
  there_.try_emplace(timeline.rank, std::move(timeline));
  changed_.notify_all();
}

std::vector<RankTimeline> TimelineInbox::take(int begin, int end,
                                              const std::function<bool(int)>& gone, Duration most) {
  constexpr auto kLook = std::chrono::milliseconds(100);  // a death does not notify
  const Deadline deadline{most};
  std::unique_lock lock(mutex_);
  for (int rank = begin; rank < end; ++rank) {
    while (!there_.contains(rank) && !gone(rank) && !deadline.passed()) {
      changed_.wait_for(lock, kLook);
    }
  }
  std::vector<RankTimeline> timelines;
  for (auto& [rank, timeline] : there_) timelines.push_back(std::move(timeline));
  there_.clear();
  return timelines;
}

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
      .count();
}

void ClockOffset::add(const ClockPing& ping, int64_t answered) {
  ++count_;
  const int64_t round_trip = answered - ping.here;
  if (round_trip >= round_trip_) return;
  round_trip_ = round_trip;
  offset_ = ping.there - (ping.here + round_trip / 2);
}

int64_t ClockOffset::value() const {
  return offset_ >= -(round_trip_ / 2 + 1) && offset_ <= round_trip_ / 2 + 1 ? 0 : offset_;
}

Status check_profile(const std::string& path) {
  if (path.empty()) return Status::ok();
  const std::ofstream file(path, std::ios::app);  // leaves an older profile alone until the end
  return file.good() ? Status::ok() : unwritable(path);
}

std::string chrome_trace(std::span<const RankTimeline> timelines) {
  int64_t zero = INT64_MAX;
  for (const RankTimeline& t : timelines) {
    for (const Event& e : t.events) zero = std::min(zero, e.begin + t.to_front_ns);
  }
  std::string json = "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n";
  const char* comma = "";
  const auto add = [&](const std::string& event) {
    json += comma + event;
    comma = ",\n";
  };
  for (const RankTimeline& t : timelines) {
    add(fmt::format(R"({{"name":"process_name","ph":"M","pid":{0},"args":{{"name":"rank {0}"}}}})",
                    t.rank));
    for (const Event& e : t.events) add(event_json(t, e, zero));
  }
  return json + "\n]}\n";
}

Status write_profile(const std::string& path, std::span<const RankTimeline> timelines) {
  if (path.empty()) return Status::ok();
  for (const RankTimeline& t : timelines) {
    if (t.dropped == 0) continue;
    spdlog::info("profile: rank {} kept its newest {} events and dropped {}", t.rank,
                 t.events.size(), t.dropped);
  }
  std::ofstream file(path, std::ios::trunc);
  file << chrome_trace(timelines);
  file.close();
  return file.good() ? Status::ok() : unwritable(path);
}

}  // namespace sortie::cli
