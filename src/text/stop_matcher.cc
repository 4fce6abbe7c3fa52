#include "text/stop_matcher.h"

#include <algorithm>
#include <utility>

namespace sortie::text {

StopMatcher::StopMatcher(std::vector<std::string> stops) {
  for (size_t i = 0; i < stops.size(); ++i) {
    if (stops[i].empty()) continue;
    Stop stop{.text = std::move(stops[i]), .index = static_cast<int>(i), .border = {}};
    stop.border.assign(stop.text.size() + 1, 0);
    size_t k = 0;
    for (size_t j = 1; j < stop.text.size(); ++j) {
      while (k > 0 && stop.text[j] != stop.text[k]) k = stop.border[k];
      if (stop.text[j] == stop.text[k]) ++k;
      stop.border[j + 1] = k;
    }
    stops_.push_back(std::move(stop));
  }
}

std::string StopMatcher::push(std::string_view piece) {
  if (matched_ >= 0) return {};
  for (const char c : piece) {
    held_ += c;
    const Stop* met = nullptr;
    for (Stop& stop : stops_) {
      while (stop.state > 0 && stop.text[stop.state] != c) stop.state = stop.border[stop.state];
      if (stop.text[stop.state] == c) ++stop.state;
      const bool whole = stop.state == stop.text.size();
      if (whole && (met == nullptr || stop.text.size() > met->text.size())) met = &stop;
    }
    if (met != nullptr) {
      matched_ = met->index;
      held_.resize(held_.size() - met->text.size());
      return std::exchange(held_, {});
    }
  }
  size_t keep = 0;
  for (const Stop& stop : stops_) keep = std::max(keep, stop.state);
  std::string free = held_.substr(0, held_.size() - keep);
  held_.erase(0, free.size());
  return free;
}

std::string StopMatcher::finish() {
  if (matched_ >= 0) return {};
  for (Stop& stop : stops_) stop.state = 0;
  return std::exchange(held_, {});
}

}  // namespace sortie::text
