// Where the seconds of a step go.
#pragma once
#include "team.h"

enum Part { LINEARS, ATTENTION, REST, DRAWING };  // norms and activations count as linears

// Adds what passed since the last call to the seconds of a part, if there are any.
struct Lap {
  double* seconds;
  Clock::time_point since = Clock::now();
  explicit Lap(double* to) : seconds(to) {}
  void operator()(Part part) {
    if (!seconds) return;
    const auto now = Clock::now();
    seconds[part] += std::chrono::duration<double>(now - since).count();
    since = now;
  }
};
