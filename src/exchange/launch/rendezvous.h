#pragma once

#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "exchange/control.h"
#include "exchange/launch/cluster_key.h"
#include "exchange/launch/handshake.h"

namespace sortie::exchange {

// Where and how the ranks that no common process started find each other.
struct Meeting {
  std::string host;  // where rank 0 listens: a name or an address
  int port = 0;
  Duration timeout = seconds(60);  // --dist-timeout
  ClusterKey key;
  bool insecure = false;  // an open key is meant: without it only the loopback address is served
  Member me;
};

// At rank 0: listens until the ranks `first` .. size - 1 have come and says welcome to all. Returns
// their sockets by rank (those below `first` stay closed). Whoever does not know the key is refused
// and costs no more than one of 64 places for at most 5 s. A member that cannot be part of the
// group (another world size, other flags, a rank that is taken) ends the meeting for all with one
// sentence.
Result<std::vector<UniqueFd>> hold_meeting(const Meeting& meeting, int first);

// At the other ranks: connects, again and again until the timeout, and waits for the welcome.
Result<UniqueFd> join_meeting(const Meeting& meeting);

// This host's address on a connection of the meeting: where the exchange between hosts goes too.
std::string local_address(const UniqueFd& socket);

}  // namespace sortie::exchange
