#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <vector>

namespace sortie {

// CPUs this process may use: the affinity mask cut by the cgroup's quota. At least 1.
int available_cpus();
// The CPU numbers of the affinity mask.
std::vector<int> allowed_cpus();
// Binds the calling thread to one CPU; false where the system refuses.
bool pin_thread(int cpu);

// A fixed team of threads that runs one function at a time. The caller is thread 0, so a pool of 1
// starts no thread. Which thread does what is fixed by the indices alone and results never depend
// on it. Where every thread has a core, waiting spins at most 200 us before it sleeps: to be woken
// can take 50 us (on a virtual machine an interrupt of another core), and a pool that spins for
// less than that falls asleep on both sides in turn, at every step.
class ThreadPool {
 public:
  // cpus: where to pin thread i (cpus[i]); empty = pin nothing. Thread 0 is whoever calls run(): it
  // pins itself with pin_caller().
  // own_cores: whether other busy threads of this host leave these ones a core each.
  explicit ThreadPool(int threads, std::vector<int> cpus = {}, bool own_cores = true);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return threads_; }
  void pin_caller() const {
    if (!cpus_.empty()) pin_thread(cpus_[0]);
  }

  // fn(thread, threads) once on each thread; returns when all are done.
  template <typename F>
  void run(F&& fn) {
    if (threads_ == 1) {
      fn(0, 1);
      return;
    }
    using Fn = std::remove_reference_t<F>;
    run_erased([](void* f, int thread, int threads) { (*static_cast<Fn*>(f))(thread, threads); },
               const_cast<void*>(static_cast<const void*>(&fn)));
  }

  // fn(i) for every i in [0, n): contiguous shares, thread 0 the first.
  template <typename F>
  void parallel_for(int64_t n, F&& fn) {
    if (n <= 1 || threads_ == 1) {
      for (int64_t i = 0; i < n; ++i) fn(i);
      return;
    }
    run([&](int thread, int threads) {
      const int64_t end = n * (thread + 1) / threads;
      for (int64_t i = n * thread / threads; i < end; ++i) fn(i);
    });
  }

 private:
  using Job = void (*)(void* fn, int thread, int threads);
  void run_erased(Job job, void* fn);
  void worker(int thread, int cpu);

  const int threads_;
  const std::vector<int> cpus_;
  const int64_t spin_ns_;
  Job job_ = nullptr;
  void* fn_ = nullptr;
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<uint32_t> running_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> workers_;
};

}  // namespace sortie
