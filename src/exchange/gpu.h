#pragma once

#include <memory>

#include "exchange/exchange.h"

namespace sortie::exchange {

// The exchange of one GPU with itself: nothing travels. The rows stay where the sender left them,
// the lists are made by a kernel from the ids, which are in the device's memory as everything else
// here; nothing waits for the host. Parts are bf16. Ids outside 0..E-1 name no expert.
std::unique_ptr<Exchange> make_gpu_exchange(const Options& options, void* stream);

}  // namespace sortie::exchange
