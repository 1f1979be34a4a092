// Threads in a browser: workers that share the memory, each in `serve` for as long as the page
// lives. Nobody makes a thread here; a worker of the page does (diagd/web/play/static/worker.js).
#pragma once

// Milliseconds, from whoever loaded the module.
extern "C" __attribute__((import_module("env"), import_name("now"))) double now();

struct Clock {
  using duration = std::chrono::duration<double, std::milli>;
  using time_point = std::chrono::time_point<Clock, duration>;
  static time_point now() { return time_point(duration(::now())); }
};

#if defined(THREADS)
// Where threads wait for each other: they spin for a while, then sleep.
class Barrier {
 public:
  void wait(int threads) {
    if (threads == 1) return;
    const int now = phase.load(std::memory_order_acquire);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      arrived.store(0, std::memory_order_relaxed);
      phase.fetch_add(1, std::memory_order_release);
      __builtin_wasm_memory_atomic_notify((int*)&phase, (unsigned)threads);
      return;
    }
    for (int i = 0; i < SPINS; i++)
      if (phase.load(std::memory_order_acquire) != now) return;
    while (phase.load(std::memory_order_acquire) == now)
      __builtin_wasm_memory_atomic_wait32((int*)&phase, now, -1);
  }

 private:
  static constexpr int SPINS = 1 << 15;  // some 50 us: a wait in a browser costs about as much
  alignas(64) std::atomic<int> arrived{0};
  alignas(64) std::atomic<int> phase{0};
};
#else
struct Barrier {
  void wait(int) {}
};
#endif

// The caller and the workers that serve it.
class Team {
 public:
  int threads = 1;  // what the page has got

  template <class Work>
  void run(int max_threads, const Work& todo) {
    if (max_threads == 1 || threads == 1) {
      Barrier nobody;
      todo(0, 1, nobody);
      return;
    }
    work = &todo;
    call = [](const void* work, int thread, int threads, Barrier& barrier) {
      (*(const Work*)work)(thread, threads, barrier);
    };
    entry.wait(threads);
    todo(0, threads, barrier);
    barrier.wait(threads);
  }

  [[noreturn]] void serve(int thread) {
    for (;;) {
      entry.wait(threads);
      call(work, thread, threads, barrier);
      barrier.wait(threads);
    }
  }

 private:
  Barrier barrier, entry;
  const void* work = nullptr;
  void (*call)(const void*, int, int, Barrier&) = nullptr;
};

inline Team team;
