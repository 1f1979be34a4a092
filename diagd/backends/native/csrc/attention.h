// Softmax attention of many queries to one head of the cache. Keys and values are taken in a part at a
// time, and so come from memory once for all queries; their parts begin at the same slots however many
// queries there are, so each one's numbers are its own.
#pragma once
#include "int8.h"

template <class Cached>
class Attention {
 public:
  static constexpr int PART = 512;  // slots; they and their values stay in the level-2 cache
  static constexpr int AT_ONCE = std::is_same_v<Cached, Pair> ? 16 : MAX_ROWS;  // queries
  static constexpr int MOST = 16 * AT_ONCE;

  // How many floats the constructor needs.
  static size_t floats(int head) { return 2 * MOST * (head + 1) + AT_ONCE * (STRIDE + head); }

  // For `count` queries, at most MOST, of `head` numbers, a multiple of BLOCK, which are zero until they
  // are written to query(i). Scores are scaled by `scale`.
  Attention(float* memory, int count, int head, float scale)
      : count(count),
        head(head),
        scale(scale),
        queries(memory),
        sums(queries + MOST * head),
        peaks(sums + MOST * head),
        masses(peaks + MOST),
        scores(masses + MOST),
        mixed(scores + AT_ONCE * STRIDE) {
    std::memset(queries, 0, (size_t)count * head * sizeof(float));  // padding has to be finite
    std::memset(sums, 0, (size_t)count * head * sizeof(float));
    std::fill(peaks, peaks + count, LOWEST);
    std::fill(masses, masses + count, 0.0f);
  }

  float* query(int i) { return queries + i * head; }

  // Reads all slots: keys are a column each, values a row. hidden(i) points to what is added to the
  // scores of query i: 0, or minus infinity.
  template <class Hidden>
  void read(const Matrix<Cached>& keys, const Matrix<Cached>& values, int slots, Hidden hidden) {
    for (int from = 0; from < slots; from += PART) {
      const int part = std::min(PART, slots - from);
      const Matrix<Cached> some_keys{keys.blocks + from / BLOCK * keys.pitch(), head, nullptr,
                                     nullptr};
      const Matrix<Cached> some_values{values.blocks + from / PACKED<Cached> * BLOCK, part, nullptr,
                                       nullptr, values.stored};
      for (int first = 0; first < count; first += AT_ONCE)
        take_in(first, std::min(AT_ONCE, count - first), some_keys, some_values, part,
                [&](int i) { return hidden(i) + from; });
    }
  }

  // Writes what query i has attended to; zeros, where it sees no slot.
  void write(int i, float* to, int head_dim) const {
    const float inverse = masses[i] == 0 ? 0 : 1 / masses[i];
    for (int d = 0; d < head_dim; d++) to[d] = sums[i * head + d] * inverse;
  }

 private:
  static constexpr float LOWEST = -1e30f;
  static constexpr ptrdiff_t STRIDE = PART + WIDTH;  // see `apart` in decoder.cpp

  template <class Hidden>
  void take_in(int first, int some, const Matrix<Cached>& keys, const Matrix<Cached>& values,
               int slots, Hidden hidden) {
    bool seen = false;
    for (int r = 0; r < some && !seen; r++) seen = sees(hidden(first + r), slots);
    if (!seen) return;
    multiply(Input<Cached>(query(first), head, some, head), keys, 0, slots / BLOCK, scores, STRIDE,
             false);
    float fade[AT_ONCE];
    for (int r = 0; r < some; r++)
      fade[r] = weigh(first + r, scores + r * STRIDE, hidden(first + r), slots);
    mix(some, values);
    for (int r = 0; r < some; r++) {
      float* to = sums + (first + r) * head;
      for (int d = 0; d < head; d += WIDTH)
        store(to + d, load(to + d) * fade[r] + load(mixed + r * head + d));
    }
  }

  static bool sees(const float* hidden, int slots) {
    return std::any_of(hidden, hidden + slots, [](float one) { return one == 0; });
  }

  // Makes weights of a query's scores; returns by how much those before have lost.
  float weigh(int i, float* row, const float* hidden, int slots) {
    Floats highest = splat(peaks[i]), total = {};
    for (int j = 0; j < slots; j += WIDTH) {
      const Floats score = load(row + j) * scale + load(hidden + j);
      store(row + j, score);
      highest = score > highest ? score : highest;
    }
    const float peak = max(highest), fade = exp2(splat(peaks[i] - peak))[0];
    for (int j = 0; j < slots; j += WIDTH) {
      const Floats weight = exp2(load(row + j) - peak);
      keep(row, j, weight);
      total += weight;
    }
    masses[i] = masses[i] * fade + sum(total);
    peaks[i] = peak;
    return fade;
  }

  // A weight is rounded at once where products are of bfloat16, over what was read.
  INLINE void keep(float* row, int j, Floats weight) const {
#if defined(BF16_DOTS)
    if constexpr (std::is_same_v<Cached, Pair>) return round_to((bf16*)row + j, weight);
#endif
    store(row + j, weight);
  }

  void mix(int some, const Matrix<Cached>& values) const {
#if defined(BF16_DOTS)
    if constexpr (std::is_same_v<Cached, Pair>)
      return multiply_rounded({(bf16*)scores, 2 * STRIDE, STEP, 0}, some, values, 0,
                              head / BLOCK, {mixed, head, nullptr, nullptr, false});
#endif
    multiply(Input<Cached>(scores, STRIDE, some, values.K), values, 0, head / BLOCK, mixed, head,
             false);
  }

  const int count, head;
  const float scale;
  float *const queries, *const sums, *const peaks, *const masses, *const scores, *const mixed;
};
