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

// The address of this host in the network of the meeting, for the exchange between hosts: that of
// the socket, or the meeting's own for a rank that has no socket of it.
std::string local_address(const UniqueFd& socket);
Result<std::string> numeric_address(const std::string& host);

}  // namespace sortie::exchange
