#pragma once

#include <cstdint>
#include <string>

namespace sortie {

// How much more memory this process can have, and what sets the limit.
struct FreeMemory {
  int64_t bytes = 0;
  std::string limit;  // "MemAvailable", "cgroup /a/b", "RLIMIT_AS"
};

// The least of the system's MemAvailable, what the memory cgroups of this process (v2 or v1, each
// of them up to the root) leave, and RLIMIT_AS. Page cache counts as free everywhere, since it
// yields. `root` stands before /proc and /sys: tests have a tree of their own there.
FreeMemory free_memory(const std::string& root = "");

// Bytes left in /dev/shm, where windows of ranks that are processes lie; 0 where there is none.
int64_t free_shared_memory();

// VmRSS and VmHWM of this process: its memory now, and the most it ever was. File pages count.
int64_t resident_bytes();
int64_t peak_resident_bytes();

}  // namespace sortie
