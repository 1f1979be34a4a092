// Whether a product of more rows than a tile has fetches the weights that come next while it
// multiplies, and no others: prints how many lines it left out, and how many it fetched beyond the
// matrix.
#include <cstdio>
#include <set>

#include "simd.h"

std::set<uintptr_t> fetched;
void note(const void*) {}  // into the level-1 cache: a few rows ahead
void note(const void* p, int, int) { fetched.insert((uintptr_t)p / 64); }
#define __builtin_prefetch(...) note(__VA_ARGS__)
#include "kernels.h"

template <class T, class X>
void try_type() {
  constexpr int K = 96, BLOCKS = 4, ROWS = MAX_ROWS + 1;
  alignas(64) static T weights[BLOCKS * (K + 1) * BLOCK];
  alignas(64) static X x[ROWS * K];
  static float out[ROWS * BLOCKS * BLOCK], scales[ROWS];
  const Matrix<T> w{weights, K};
  fetched.clear();
  multiply_vectors(x, K, ROWS, w, 0, BLOCKS,
                   {out, BLOCKS * BLOCK, nullptr, nullptr, false, scales});
  for (uintptr_t line = (uintptr_t)x / 64; line <= (uintptr_t)(x + ROWS * K) / 64; line++)
    fetched.erase(line);  // where nothing comes next
  int left_out = 0;
  const uintptr_t end = (uintptr_t)w.column(BLOCKS * BLOCK) / 64;
  for (uintptr_t line = (uintptr_t)w.column(BLOCK) / 64; line < end; line++)
    left_out += !fetched.count(line);
  const auto beyond = std::distance(fetched.lower_bound(end), fetched.end());
  std::printf("%d %d\n", left_out, (int)beyond);
}

int main() {
  try_type<float, float>();
  try_type<Pair, float>();
  try_type<Duo, int16_t>();
  try_type<Quad, int8_t>();
}
