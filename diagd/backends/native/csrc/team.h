// How threads work together on a machine that may be busy with other things.
//
// OpenMP's own barrier spins for milliseconds. With other processes on the cores, the thread that is
// waited for may not be running at all, and every spin takes from the time that it could run in.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

using Clock = std::chrono::steady_clock;

// Where threads wait for each other: they spin as long as that pays, then sleep.
class Barrier {
 public:
  // Returns when all `threads` threads have come here.
  void wait(int threads) {
    const uint32_t now = phase.load(std::memory_order_acquire);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      arrived.store(0, std::memory_order_relaxed);
      phase.store(now + 1, std::memory_order_release);
      phase.notify_all();
      return;
    }
    for (int i = budget.load(std::memory_order_relaxed); i > 0; i--) {
      if (phase.load(std::memory_order_acquire) != now) return;
      pause();
    }
    const auto asleep = Clock::now();
    phase.wait(now, std::memory_order_acquire);
    const Clock::duration slept = Clock::now() - asleep;
    if (slept < WORTH_IT) {
      budget.store(MOST, std::memory_order_relaxed);
      return;
    }
    budget.store(std::max(LEAST, budget.load(std::memory_order_relaxed) / 2),
                 std::memory_order_relaxed);
    waited.fetch_add(slept.count(), std::memory_order_relaxed);
  }

  // How long, since the last call, threads slept for one that was not running.
  Clock::duration take_waited() {
    return Clock::duration(waited.exchange(0, std::memory_order_relaxed));
  }

 private:
  // Pauses of some 50 ns: a sleep that was so short that spinning on would have paid brings back the
  // most of them, any other halves them.
  static constexpr int LEAST = 16, MOST = 4096;
  static constexpr auto WORTH_IT = std::chrono::microseconds(150);

  static void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  alignas(64) std::atomic<int> arrived{0};
  alignas(64) std::atomic<uint32_t> phase{0};
  alignas(64) std::atomic<int> budget{MOST};
  std::atomic<Clock::rep> waited{0};
};

// The threads that one caller leads. Where some of them are kept from running, and half of the
// time of two calls goes into waiting for them, the caller works alone for a while, then tries again.
class Team {
 public:
  Barrier barrier;

  // How many of `threads` should take the next call.
  int size(int threads) const { return alone ? 1 : threads; }

  // Takes in how the call went.
  void done(int threads, Clock::duration took) {
    if (threads == 1) {
      alone -= alone > 0;
    } else if (2 * barrier.take_waited() <= took) {
      suspect = false;
      penalty /= 2;
    } else if (suspect || penalty) {
      alone = penalty = std::min(MOST_ALONE, 2 * penalty + 32);
    } else {
      suspect = true;  // once is nothing
    }
  }

 private:
  static constexpr int MOST_ALONE = 1024;  // calls
  int alone = 0, penalty = 0;
  bool suspect = false;
};

inline thread_local Team team;
