#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <functional>

namespace sortie {

// What `measure` returns in a process of its own, whose memory nothing before has touched; -1 if it
// did not come to an end.
inline int64_t in_child(const std::function<int64_t()>& measure) {
  int ends[2];
  EXPECT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    const int64_t value = measure();
    const ssize_t written = write(ends[1], &value, sizeof value);
    _exit(written == sizeof value ? 0 : 1);
  }
  close(ends[1]);
  int64_t value = -1;
  if (read(ends[0], &value, sizeof value) != static_cast<ssize_t>(sizeof value)) value = -1;
  close(ends[0]);
  waitpid(child, nullptr, 0);
  return value;
}

}  // namespace sortie
