#pragma once

#include <string>

// What tells one host from another. Empty where the system does not say.
namespace sortie {

// The running system's own id: the same in all its processes and containers, another after a boot.
std::string boot_id();

// In this process's UTS namespace.
std::string host_name();

}  // namespace sortie
