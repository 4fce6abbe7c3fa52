#include "exchange/ucx_lane.h"

#include <cstdio>
#include <cstdlib>

namespace sortie::exchange {

// "lane[0]:  1:sysv/memory.0 md[1] ..." names the transport and device of the first lane.
std::string first_lane(const UcxApi& api, ucp_ep_h endpoint) {
  char* text = nullptr;
  size_t size = 0;
  FILE* out = open_memstream(&text, &size);
  if (out == nullptr) return "unknown";
  api.ep_print_info(endpoint, out);
  std::fclose(out);
  std::string info(text, size);
  std::free(text);  // NOLINT(cppcoreguidelines-no-malloc): open_memstream's
  const size_t lane = info.find("lane[0]:");
  const size_t begin = lane == std::string::npos ? lane : info.find(':', lane + 8);
  if (begin == std::string::npos) return "unknown";
  return info.substr(begin + 1, info.find_first_of(". \n", begin) - begin - 1);
}

}  // namespace sortie::exchange
