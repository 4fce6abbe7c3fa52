#pragma once

#include <string>

#include "exchange/ucx_api.h"

namespace sortie::exchange {

// Transport and device of an endpoint's first lane: "sysv/memory", "tcp/eth0".
std::string first_lane(const UcxApi& api, ucp_ep_h endpoint);

}  // namespace sortie::exchange
