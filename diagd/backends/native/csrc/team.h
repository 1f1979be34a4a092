// How threads work together on a machine that may be busy with other things.
//
// OpenMP's own barriers spin for milliseconds. With other processes on the cores, the thread that
// is waited for may not be running at all, and every spin takes from the time that it could run in.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#if defined(__wasm__)
#include "wasm/team.h"
#else
#include <thread>
#ifndef _WIN32
#include <pthread.h>
#endif

using Clock = std::chrono::steady_clock;

// Where threads wait for each other: they spin as long as that pays, then sleep. A sleep that was
// so short that spinning on would have paid brings back the longest spin, any other halves it,
// unless the spin is fixed.
class Barrier {
 public:
  Barrier() = default;
  explicit Barrier(Clock::duration spin) : learns(false), spin(spin.count()) {}

  // Comes here without waiting; returns whether that made it all of the `threads`, who go on.
  bool arrive(int threads) {
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 < threads) return false;
    arrived.store(0, std::memory_order_relaxed);
    phase.fetch_add(1, std::memory_order_release);
    phase.notify_all();
    return true;
  }

  // Returns when all `threads` threads have come here.
  void wait(int threads) {
    if (threads == 1) return;
    const uint32_t now = phase.load(std::memory_order_acquire);
    if (arrive(threads)) return;
    const auto came = Clock::now();
    auto asleep = came;
    while ((asleep - came).count() < spin.load(std::memory_order_relaxed)) {
      for (int i = 0; i < 64; i++) {  // of 10 to 50 ns
        if (phase.load(std::memory_order_acquire) != now) return;
        pause();
      }
      asleep = Clock::now();
    }
    phase.wait(now, std::memory_order_acquire);
    if (!learns) return;
    const Clock::duration slept = Clock::now() - asleep;
    if (slept < WORTH_IT) {
      spin.store(MAX_SPIN.count(), std::memory_order_relaxed);
      return;
    }
    spin.store(spin.load(std::memory_order_relaxed) / 2, std::memory_order_relaxed);
    waited.fetch_add(slept.count(), std::memory_order_relaxed);
  }

  // How long, since the last call, threads slept for one that was not running.
  Clock::duration drain_waited() {
    return Clock::duration(waited.exchange(0, std::memory_order_relaxed));
  }

 private:
  static constexpr Clock::duration MAX_SPIN = std::chrono::microseconds(100);
  static constexpr Clock::duration WORTH_IT = std::chrono::microseconds(150);

  static void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  const bool learns = true;
  alignas(64) std::atomic<int> arrived{0};
  alignas(64) std::atomic<uint32_t> phase{0};
  alignas(64) std::atomic<Clock::rep> spin{MAX_SPIN.count()};
  std::atomic<Clock::rep> waited{0};
};

// Forks of this process so far: threads do not come along.
inline std::atomic<int> forks{0};
#ifndef _WIN32
inline const int watches_forks = pthread_atfork(nullptr, nullptr, [] { forks++; });
#endif

// Threads that wait for a caller's work, and own the pool with the caller. Nobody waits for their
// end: where the caller is a thread that ends, Windows lets no other thread end meanwhile, and
// after a fork there are none.
class ThreadPool {
 public:
  static std::shared_ptr<ThreadPool> start(int threads) {
    const auto pool = std::make_shared<ThreadPool>(threads);
    int started = 1;
    try {
      for (; started < threads; started++)
        std::thread([pool, started] { pool->serve(started); }).detach();
    } catch (...) {  // the system gives no more: for those that wait, the others come too, and go
      for (; started < threads; started++) pool->entry.arrive(threads);
      pool->stop();
      throw;
    }
    return pool;
  }
  explicit ThreadPool(int threads) : threads(threads), born(forks) {}

  void stop() {
    call = nullptr;
    entry.arrive(threads);
  }

  template <class Work>
  void run(const Work& todo) {
    work = &todo;
    call = [](const void* work, int thread, int threads, Barrier& barrier) {
      (*(const Work*)work)(thread, threads, barrier);
    };
    entry.wait(threads);
    todo(0, threads, barrier);
    barrier.wait(threads);
  }

  bool alive() const { return born == forks; }

  const int threads;
  Barrier barrier;

 private:
  void serve(int thread) {
    for (;;) {
      entry.wait(threads);
      if (!call) return;
      call(work, thread, threads, barrier);
      barrier.wait(threads);
    }
  }

  const int born;
  Barrier entry{std::chrono::microseconds(500)};  // longer than what is between the calls of a step
  const void* work = nullptr;
  void (*call)(const void*, int, int, Barrier&) = nullptr;
};

// The pool of one calling thread. Where some of its threads are kept from running, and half of the
// time of two calls goes into waiting for them, the caller works alone for a while, then tries
// again.
class Team {
 public:
  ~Team() { stop(); }

  // Calls work(thread, threads, barrier) on `max_threads` threads at once, or on fewer.
  template <class Work>
  void run(int max_threads, const Work& work) {
    if (max_threads == 1 || alone) {
      Barrier nobody;
      work(0, 1, nobody);
      alone -= alone > 0;
      return;
    }
    if (!pool || pool->threads != max_threads || !pool->alive()) {
      stop();
      pool = ThreadPool::start(max_threads);
    }
    const auto started = Clock::now();
    pool->run(work);
    adapt(Clock::now() - started);
  }

 private:
  // Works alone for a while after two calls that waited too long.
  void adapt(Clock::duration took) {
    if (2 * pool->barrier.drain_waited() <= took) {
      was_slow = false;
      penalty /= 2;
    } else if (was_slow || penalty) {
      alone = penalty = std::min(MAX_ALONE, 2 * penalty + 4);
    } else {
      was_slow = true;  // once is not enough
    }
  }

  void stop() {
    if (pool) pool->stop();
    pool.reset();
  }

  static constexpr int MAX_ALONE = 1024;  // calls
  std::shared_ptr<ThreadPool> pool;
  int alone = 0, penalty = 0;
  bool was_slow = false;
};

inline thread_local Team team;
#endif
