#pragma once

#include <cstdint>
#include <string>

#include "exchange/exchange.h"

namespace sortie::exchange {

// What every transport must pass: one rank's side of many steps with random tokens, each checked
// against a plain computation. Every rank can compute what every other sends, so no rank needs to
// be told. Returns the first difference, or "". The ranks call it with the same seed.
Options conformance_options(int ranks, Mode mode);
std::string conform(Exchange& exchange, uint64_t seed, int steps);

}  // namespace sortie::exchange
