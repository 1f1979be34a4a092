// Where threads wait for each other: they spin as long as that pays, then sleep.
//
// OpenMP's own barrier spins for milliseconds. With other processes on the cores, the one waited for
// may not be running at all, and every spin takes from the time that it could run in.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

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
    const auto asleep = std::chrono::steady_clock::now();
    phase.wait(now, std::memory_order_acquire);
    const auto slept = std::chrono::steady_clock::now() - asleep;
    const int spins = budget.load(std::memory_order_relaxed);
    budget.store(slept < WORTH_IT ? MOST : std::max(LEAST, spins / 2), std::memory_order_relaxed);
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
};
