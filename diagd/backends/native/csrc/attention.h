// Softmax attention of many queries to one head of the cache. Keys and values are taken in a part
// at a time, and so come from memory once for all queries; parts end at the same slots however many
// queries there are, and what one of them does not see of a part adds zeros, so each one's numbers
// are its own.
#pragma once
#include "integers.h"

// The slots of a part between the first and the last one that are seen, in whole blocks; empty
// where none is.
struct Span {
  int32_t from, to;
  static Span of(const float* hidden, int slots) {
    const auto seen = [](float one) { return one == 0; };
    const float *const end = hidden + slots, *const first = std::find_if(hidden, end, seen);
    if (first == end) return {INT32_MAX, 0};
    const float* last = end;
    while (!seen(last[-1])) last--;
    return {(int32_t)(first - hidden) / BLOCK * BLOCK, ceil_to(last - hidden, BLOCK)};
  }
};

template <class Cached>
class Attention {
 public:
  static constexpr int PART = 512;  // slots; they and their values stay in the level-2 cache
  // Queries.
  static constexpr int AT_ONCE = std::is_same_v<Cached, Pair> ? 16
                                 : REGISTER == 64             ? MAX_ROWS
                                                              : 3 * MAX_ROWS;
  static constexpr int MAX_QUERIES = 16 * AT_ONCE;

  // How many floats the constructor needs.
  static uint64_t floats(uint64_t head) {
    return 2 * MAX_QUERIES * (head + 1) + AT_ONCE * (STRIDE + head);
  }

  // For `count` queries, at most MAX_QUERIES, of `head` numbers, a multiple of BLOCK, which are
  // zero until they are written to query(i). Scores are scaled by `scale`.
  Attention(float* memory, int count, ptrdiff_t head, float scale)
      : count(count),
        head(head),
        scale(scale),
        queries(memory),
        sums(queries + MAX_QUERIES * head),
        peaks(sums + MAX_QUERIES * head),
        masses(peaks + MAX_QUERIES),
        scores(masses + MAX_QUERIES),
        mixed(scores + AT_ONCE * STRIDE) {
    std::memset(queries, 0, count * head * sizeof(float));  // padding has to be finite
    std::memset(sums, 0, count * head * sizeof(float));
    std::fill(peaks, peaks + count, LOWEST);
    std::fill(masses, masses + count, 0.0f);
  }

  float* query(int i) { return queries + i * head; }

  // Reads the slots that somebody sees: keys are a column each, values a row. hidden(i) points to
  // what is added to the scores of query i: 0, or minus infinity; spans(i) to where it sees
  // something, for each part. Whole numbers have a scale for each slot.
  template <class Hidden, class Spans>
  void read(const Matrix<Cached>& keys, const Matrix<Cached>& values, const float* value_scales,
            int parts, Hidden hidden, Spans spans) {
    static_assert(PART <= MAX_DUOS && PART % BLOCK == 0);
    for (int part = 0; part < parts; part++)
      for (int first = 0; first < count; first += AT_ONCE) {
        const int some = std::min(AT_ONCE, count - first);
        Span seen{INT32_MAX, 0};
        for (int i = first; i < first + some; i++) {
          const Span own = spans(i)[part];
          seen = {std::min(seen.from, own.from), std::max(seen.to, own.to)};
        }
        if (!seen.to) continue;
        const int from = part * PART + seen.from, slots = seen.to - seen.from;
        const Matrix<Cached> some_keys{keys.column(from), (int)head, nullptr,
                                       keys.scale ? keys.scale + from : nullptr};
        const Matrix<Cached> some_values{values.blocks + from / PACKED<Cached> * BLOCK, slots,
                                         nullptr, nullptr, values.stored};
        take_in(first, some, some_keys, some_values, value_scales + from, slots,
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
  static constexpr ptrdiff_t STRIDE = PART + LINE;  // see `apart` in decoder.cpp

  template <class Hidden>
  void take_in(int first, int some, const Matrix<Cached>& keys, const Matrix<Cached>& values,
               const float* value_scales, int slots, Hidden hidden) {
    multiply(Input<Cached>(query(first), head, some, (int)head), keys, 0, slots / BLOCK, scores,
             STRIDE, false);
    float fade[AT_ONCE];
    // the first block of values is fetched while their weights are made, a vector a turn
    const ptrdiff_t slot = BLOCK * sizeof(Cached) / PACKED<Cached>;  // bytes
    Ahead ahead{(const char*)values.blocks, std::min<ptrdiff_t>(slot * WIDTH / some, 64)};
    for (int r = 0; r < some; r++)
      fade[r] = weigh(first + r, scores + r * STRIDE, hidden(first + r), value_scales, slots,
                      unit[r], ahead);
    mix(some, values);
    for (int r = 0; r < some; r++) {
      float* to = sums + (first + r) * head;
      for (int d = 0; d < head; d += WIDTH)
        store(to + d, load(to + d) * fade[r] + load(mixed + r * head + d));
    }
  }

  // Makes weights of a query's scores; returns by how much those before have lost. Whole numbers
  // are of `unit` then.
  float weigh(int i, float* row, const float* hidden, const float* value_scales, int slots,
              float& unit, Ahead& ahead) {
    Floats highest[BLOCK / WIDTH];
    Ints largest = {};  // scale of a value that is seen
    for (int v = 0; v < BLOCK / WIDTH; v++) highest[v] = splat(peaks[i]);
    for (int j = 0; j < slots; j += BLOCK)
      for (int v = 0; v < BLOCK / WIDTH; v++) {
        const int at = j + v * WIDTH;
        const Floats hides = load(hidden + at), score = load(row + at) * scale + hides;
        store(row + at, score);
        highest[v] = greater(score, highest[v]);
        if constexpr (WHOLE<Cached>)
          largest = greater((Ints)load(value_scales + at) & ~(Ints)hides, largest);
      }
    float steps = 1;
    if constexpr (WHOLE<Cached>) {
      const float peak = max_of_bits(largest);
      steps = steps_to(HIGHEST_WEIGHT, peak), unit = peak / HIGHEST_WEIGHT;
    }
    for (int v = 1; v < BLOCK / WIDTH; v++) highest[0] = greater(highest[v], highest[0]);
    const float peak = max(highest[0]), fade = exp2(splat(peaks[i] - peak))[0];
    Parts total;
    for (int j = 0; j < slots; j += LINE)
      for (int part = 0; part < LINE / WIDTH; part++) {
        const int at = j + part * WIDTH;
        ahead.fetch();
        const Floats weight = exp2(load(row + at) - peak);
        if constexpr (WHOLE<Cached>)
          put_shorts((int16_t*)row + at, to_ints(load(value_scales + at) * steps * weight));
        else
          keep(row, at, weight);
        total.at[part] += weight;
      }
    masses[i] = masses[i] * fade + total.sum();
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
    Output out{mixed, head};
#if defined(BF16_DOTS)
    if constexpr (std::is_same_v<Cached, Pair>)
      return multiply_rounded({(bf16*)scores, 2 * STRIDE, STEP, 0}, some, values, 0, head / BLOCK,
                              out);
#endif
    if constexpr (WHOLE<Cached>) {
      out.row_scale = unit;
      multiply_vectors((const int16_t*)scores, 2 * STRIDE, some, values, 0, head / BLOCK, out);
    } else {
      multiply_vectors(scores, STRIDE, some, values, 0, head / BLOCK, out);
    }
  }

  float unit[AT_ONCE];
  const int count;
  const ptrdiff_t head;  // offsets are of 64 bits
  const float scale;
  float *const queries, *const sums, *const peaks, *const masses, *const scores, *const mixed;
};
