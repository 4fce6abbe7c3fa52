#pragma once

#include <array>
#include <cstddef>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace sortie::exchange {

// The secret that the ranks of a group share (--cluster-key-file). Empty only with --insecure:
// everybody who can reach the port knows that one.
struct ClusterKey {
  std::vector<std::byte> secret;
  bool open() const { return secret.empty(); }
};

// Reads a key: the file's bytes, less a newline at the end; 16 to 4096 of them. Refused: a file
// that others may read, or that belongs to somebody else.
Result<ClusterKey> read_cluster_key(const std::string& path);

// The user's own key of this host, made on first use where only this user can read it: for ranks
// that a launcher started on one host.
Result<ClusterKey> host_cluster_key();

using Nonce = std::array<std::byte, 32>;
using Mac = std::array<std::byte, 32>;
Nonce random_nonce();
// HMAC-SHA256 over a label and the parts, each of a length that the label fixes.
Mac hmac_sha256(const ClusterKey& key, std::string_view label,
                std::initializer_list<std::span<const std::byte>> parts);
bool same_mac(const Mac& a, const Mac& b);  // in constant time

}  // namespace sortie::exchange
