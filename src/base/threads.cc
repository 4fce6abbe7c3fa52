#include "base/threads.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>
#include <utility>

#include "base/clock.h"

namespace sortie {

namespace {

// CPUs' worth of time that cgroup v2 grants, or 0 where it sets no limit.
int cgroup_cpus() {
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  std::string quota;
  double period = 0;
  if (!(file >> quota >> period) || quota == "max" || period <= 0) return 0;
  return std::max(1, static_cast<int>(std::floor(std::strtod(quota.c_str(), nullptr) / period)));
}

// Waits until `value` differs from `old`: spins for a while, then sleeps.
void wait_change(std::atomic<uint32_t>& value, uint32_t old, int64_t spin_ns) {
  if (spin_ns > 0) {
    const TimePoint end = Clock::now() + std::chrono::nanoseconds(spin_ns);
    do {
      for (int i = 0; i < 64; ++i) {
        if (value.load(std::memory_order_acquire) != old) return;
      }
    } while (Clock::now() < end);
  }
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

}  // namespace

std::vector<int> allowed_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> cpus;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return {0};
  for (int i = 0; i < CPU_SETSIZE; ++i) {
    if (CPU_ISSET(i, &set)) cpus.push_back(i);
  }
  return cpus;
}

int available_cpus() {
  const int mask = std::max<int>(1, static_cast<int>(allowed_cpus().size()));
  const int quota = cgroup_cpus();
  return quota == 0 ? mask : std::min(mask, quota);
}

bool pin_thread(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  return sched_setaffinity(0, sizeof set, &set) == 0;
}

ThreadPool::ThreadPool(int threads, std::vector<int> cpus, bool own_cores)
    : threads_(std::max(1, threads)),
      cpus_(std::move(cpus)),
      spin_ns_(own_cores && threads_ <= available_cpus() ? 200'000 : 0) {
  for (int i = 1; i < threads_; ++i) {
    const int cpu = static_cast<size_t>(i) < cpus_.size() ? cpus_[static_cast<size_t>(i)] : -1;
    workers_.emplace_back([this, i, cpu] { worker(i, cpu); });
  }
}

ThreadPool::~ThreadPool() {
  stop_ = true;
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  for (std::thread& t : workers_) t.join();
}

void ThreadPool::run_erased(Job job, void* fn) {
  job_ = job;
  fn_ = fn;
  running_.store(static_cast<uint32_t>(threads_ - 1), std::memory_order_relaxed);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  job(fn, 0, threads_);
  for (uint32_t left = running_.load(std::memory_order_acquire); left != 0;
       left = running_.load(std::memory_order_acquire)) {
    wait_change(running_, left, spin_ns_);
  }
}

void ThreadPool::worker(int thread, int cpu) {
  if (cpu >= 0) pin_thread(cpu);
  uint32_t seen = 0;
  for (;;) {
    wait_change(generation_, seen, spin_ns_);
    seen = generation_.load(std::memory_order_acquire);
    if (stop_) return;
    job_(fn_, thread, threads_);
    if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) running_.notify_all();
  }
}

}  // namespace sortie
