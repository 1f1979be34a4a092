// Draws one token a place; the rules and their order are those of diagd/decoding/sampling.py.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels.h"
#include "lap.h"
#include "records.h"

namespace {

struct Candidate {
  float score, mass;
  int id;
};

uint32_t mix(uint32_t bits) {
  bits = (bits ^ (bits >> 16)) * 0x7FEB352Du;
  bits = (bits ^ (bits >> 15)) * 0x846CA68Bu;
  return bits ^ (bits >> 16);
}

float uniform_of(uint32_t key, int id) {
  const uint32_t bits = mix(key ^ mix((uint32_t)id + 0x9E3779B9u));
  return std::min(((float)bits + 0.5f) * 0x1p-32f, 1 - 0x1p-24f);
}

constexpr int64_t UNDRAWN = -1;  // as in diagd/decoding/sampling.py

// The highest of n scores; NaN where any is NaN.
float highest(const float* scores, int n) {
  Floats best = splat(-INFINITY), broken = {};
  int i = 0;
  for (; i + WIDTH <= n; i += WIDTH) {
    const Floats x = load(scores + i);
    broken = x == x ? broken : x;
    best = x > best ? x : best;
  }
  float total = 0, peak = max(best);
  for (int j = 0; j < WIDTH; j++) total += broken[j];
  for (; i < n; i++) {
    if (scores[i] != scores[i]) total = scores[i];
    peak = std::max(peak, scores[i]);
  }
  return total == total ? peak : total;
}

// Bit i says whether number i of WIDTH is at least `bar`.
uint32_t at_least(const float* numbers, float bar) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(_mm512_loadu_ps(numbers), _mm512_set1_ps(bar), _CMP_GE_OQ);
#else
  uint32_t bits = 0;
  for (int i = 0; i < WIDTH; i++) bits |= (uint32_t)(numbers[i] >= bar) << i;
  return bits;
#endif
}

int64_t greedy(const float* logits, int low, int high) {
  const float peak = highest(logits + low, high - low);
  return std::isfinite(peak) ? std::find(logits + low, logits + high, peak) - logits : UNDRAWN;
}

// Keeps the likeliest candidates, the lower id of equals, as far as top_p allows. Masses are at
// most 1.
void keep_nucleus(const Draw& d, std::vector<Candidate>& kept, double total) {
  const auto bucket = [](const Candidate& c) { return std::bit_cast<uint32_t>(c.mass) >> 21; };
  constexpr int HIGHEST = std::bit_cast<uint32_t>(1.0f) >> 21;
  double within[HIGHEST + 1] = {}, before = 0;
  for (const Candidate& c : kept) within[bucket(c)] += c.mass;
  // the bucket in which the nucleus ends: only its masses are put in order
  unsigned last = HIGHEST;
  while (last && (float)((before + within[last]) / total) < d.top_p) before += within[last--];
  auto rest = std::partition(kept.begin(), kept.end(),
                             [&](const Candidate& c) { return bucket(c) > last; });
  const auto end =
      std::partition(rest, kept.end(), [&](const Candidate& c) { return bucket(c) == last; });
  std::sort(rest, end, [](const Candidate& a, const Candidate& b) {
    return a.mass > b.mass || (a.mass == b.mass && a.id < b.id);
  });
  const auto stays = [&](const Candidate& c) {
    return d.exclusive_top_p ? rest == kept.begin() || (float)((before + c.mass) / total) <= d.top_p
                             : (float)(before / total) < d.top_p;
  };
  for (; rest != end && stays(*rest); ++rest) before += rest->mass;
  kept.erase(rest, kept.end());
}

int64_t sample(const Draw& d, const float* logits, int low, int high, uint32_t key,
               std::vector<Candidate>& kept, std::vector<float>& scores) {  // scratch
  const int n = high - low, whole = ceil_to(n, LINE);
  scores.resize((size_t)2 * whole);
  float* masses = scores.data() + whole;
  for (int i = 0; i < n; i++) scores[i] = logits[low + i] / d.temperature;
  std::fill(scores.data() + n, masses, -INFINITY);
  const float peak = highest(scores.data(), n);
  if (!std::isfinite(peak)) return UNDRAWN;
  float lowest = -INFINITY;
  if (d.top_k > 0 && d.top_k < n) {  // ties with the last one stay
    std::vector<float> order(scores.begin(), scores.begin() + n);
    std::nth_element(order.begin(), order.begin() + d.top_k - 1, order.end(), std::greater<>());
    lowest = order[d.top_k - 1];
  }
  for (int i = 0; i < whole; i += WIDTH) {
    const Floats score = load(scores.data() + i);
    store(masses + i, score >= lowest ? exp(score - peak) : Floats{});
  }
  double sums[LINE] = {}, total = 0;
  for (int i = 0; i < whole; i += LINE)
    for (int j = 0; j < LINE; j++) sums[j] += masses[i + j];
  for (double sum : sums) total += sum;
  // Ids of less than (1 - p) / n have less than 1 - p among them: all beyond the nucleus. What has
  // no mass is e^-87 as likely as the best, or less.
  const float negligible =
      d.top_p < 1 ? 0.5f * (1 - d.top_p) / n * total : std::numeric_limits<float>::min();
  kept.clear();
  for (int i = 0; i < whole; i += WIDTH)
    for (uint32_t bits = at_least(masses + i, negligible); bits; bits &= bits - 1) {
      const int id = i + std::countr_zero(bits);
      kept.push_back({scores[id], masses[id], low + id});
    }
  if (d.top_p < 1) keep_nucleus(d, kept, total);
  // A Gumbel number is at most -log(uniform): most ids lose to the best without a logarithm.
  float best = -INFINITY, bar = 0;
  int winner = kept[0].id;
  for (const Candidate& c : kept) {
    const float u = uniform_of(key, c.id);
    if (c.mass < bar * u) continue;
    const float value = c.score - std::log(-std::log1p(-u));
    if (value > best || (value == best && c.id < winner)) {
      best = value;
      winner = c.id;
      bar = 0.999f * std::exp(best - peak);
    }
  }
  return winner;
}

int draw_all(const Draw& d) {
  for (int i = 0; i < d.count; i++)
    if (d.low[i] < 0 || d.low[i] >= d.high[i] || d.high[i] > d.vocab) return 1;
  Lap lap(d.seconds);
  std::atomic<int64_t> next{0};
  std::atomic<int> failed{0};
  const auto draw_some = [&] {
    std::vector<Candidate> kept;
    std::vector<float> scores;
    for (int64_t i; (i = next++) < d.count;) {
      const int low = d.low[i], high = d.high[i];
      const float* logits = d.logits + i * d.stride;
      const uint64_t seed = d.seeds[i];
      uint32_t key = mix((uint32_t)seed ^ mix((uint32_t)(seed >> 32) ^ 0x9E3779B9u));
      for (const int64_t place : {d.frames[i], d.rows[i], d.columns[i]})
        key = mix(key ^ mix((uint32_t)place + 0x85EBCA6Bu));
      d.drawn[i] = d.temperature == 0 ? greedy(logits, low, high)
                                      : sample(d, logits, low, high, key, kept, scores);
    }
    return 0;
  };
  team.run(d.count == 1 ? 1 : d.threads, [&](int, int, Barrier&) {
    if (guarded(draw_some)) failed = 2;
  });
  lap(DRAWING);
  return failed;
}

}  // namespace

// Returns 0, or 1 without having done anything where the valid ids of a place are none of the
// logits', 2 where there is not enough memory.
extern "C" int draw(const Draw* d) {
  return guarded([&] { return draw_all(*d); });
}
