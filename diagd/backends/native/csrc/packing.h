// Rows of numbers as products of bfloat16 take them in training.
#pragma once
#include "bf16.h"
#include "records.h"

#if defined(BF16_DOTS)

constexpr int SIDE = 32;  // lanes of a block

// Where the numbers of a head begin, of so many, for a lane.
INLINE ptrdiff_t place(const Attended& a, int heads, int batch, int lane, int head) {
  return (((ptrdiff_t)batch * a.lanes + lane) * heads + head) * a.head_dim;
}
INLINE float* masses_of(const Attended& a, int batch, int head) {
  return a.masses + ((ptrdiff_t)batch * a.heads + head) * a.lanes;
}

// Rows of one head, padded with zeros to whole blocks.
struct Rows {
  const bf16* first;
  ptrdiff_t stride;
  int lanes, size;
  Rows(const bf16* x, const Attended& a, int heads, int batch, int head)
      : first(x + place(a, heads, batch, 0, head)),
        stride((ptrdiff_t)heads * a.head_dim),
        lanes(a.lanes),
        size(a.head_dim) {}
  const bf16* row(int i) const { return first + i * stride; }
  int padded() const { return ceil_to(lanes, SIDE); }
  size_t count() const { return (size_t)padded() * size; }
};

// Numbers that begin at a line of the cache, all zero at first.
template <class T>
class Lines {
 public:
  void clear(size_t count) { lines.assign((count * sizeof(T) + 63) / 64, Line{}); }
  T& operator[](size_t i) { return *((T*)lines.data() + i); }
  const T& operator[](size_t i) const { return *((const T*)lines.data() + i); }

 private:
  struct alignas(64) Line {
    char bytes[64];
  };
  std::vector<Line> lines;
};
using Packed = Lines<bf16>;
using Sums = Lines<float>;

// Of 16 numbers, each so far from the one before.
INLINE __m512i apart(int distance) {
  const __m512i count = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  return _mm512_mullo_epi32(count, _mm512_set1_epi32(distance));
}

INLINE __m512i widen(const bf16* x) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x));
}

// As they are: [lane][d].
static void pack_rows(const Rows& x, Packed& to) {
  to.clear(x.count());
  for (int i = 0; i < x.lanes; i++)
    std::memcpy(&to[(size_t)i * x.size], x.row(i), x.size * sizeof(bf16));
}
// For sums over lanes: [two lanes][d][which of them].
static void pack_pairs(const Rows& x, Packed& to) {
  to.clear(x.count());
  for (int i = 0; i < x.lanes; i += 2)
    for (int d = 0; d < x.size; d += WIDTH) {
      __m512i both = widen(x.row(i) + d);
      if (i + 1 < x.lanes)
        both = _mm512_or_si512(both, _mm512_slli_epi32(widen(x.row(i + 1) + d), 16));
      _mm512_store_si512(&to[((size_t)i / 2 * x.size + d) * 2], both);
    }
}
// Numbers d and d + 1 of 16 lanes from i on.
INLINE __m512i pairs_of(const Rows& x, int i, int d) {
  const __mmask16 there = _cvtu32_mask16((1u << std::min(16, x.lanes - i)) - 1);
  const __m512i at = apart(x.stride / 2);
  return _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), there, at, x.row(i) + d, 4);
}
// For sums over d: [16 lanes][two d][lane][which of them].
static void pack_turned(const Rows& x, Packed& to) {
  to.clear(x.count());
  for (int i = 0; i < x.lanes; i += 16)
    for (int d = 0; d < x.size; d += 2)
      _mm512_store_si512(&to[(size_t)i * x.size + 16 * d], pairs_of(x, i, d));
}
// [d][lane].
static void pack_columns(const Rows& x, Packed& to) {
  to.clear(x.count());
  for (int i = 0; i < x.lanes; i += 16)
    for (int d = 0; d < x.size; d += 2) {
      const __m512i both = pairs_of(x, i, d);
      bf16* at = &to[(size_t)d * x.padded() + i];
      _mm256_store_si256((__m256i*)at, _mm512_cvtepi32_epi16(both));
      _mm256_store_si256((__m256i*)(at + x.padded()),
                         _mm512_cvtepi32_epi16(_mm512_srli_epi32(both, 16)));
    }
}
#endif
