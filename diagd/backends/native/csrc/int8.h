// Products with weights of 8 bits, in whole numbers.
//
// A row of activations becomes numbers of 16 bits, 256 high + low, with a scale of its own; the sums
// of each part times the weights fit into 32 bits and are exact. So results depend neither on how
// many lanes share a step nor on which unit multiplied.
#pragma once
#include "kernels.h"

#if defined(__AVX512VNNI__)  // processors with AMX have it, too
namespace int8 {

constexpr int ROWS = 16, TURN = 64;  // rows and values of k at a time
constexpr int HIGHEST = 127 * 256;

// sums[part][row][column] over k: of the high parts, and of the low ones.
typedef int32_t Sums[2][ROWS][BLOCK];

struct Rows {  // of activations, in groups of ROWS: the high parts of a group, then its low ones
  std::vector<int8_t> parts;
  std::vector<float> scales;
  ptrdiff_t stride = 0;

  const int8_t* of(int first) const { return parts.data() + 2 * first * stride; }

  void round(const float* x, ptrdiff_t x_stride, int rows, int K) {
    stride = ceil_to(K, TURN) + TURN;  // rows a power of two apart would evict each other
    const size_t needed = 2 * ceil_to(rows, ROWS) * stride;
    if (parts.size() < needed) parts.resize(needed);
    if (scales.size() < (size_t)rows) scales.resize(rows);
    for (int row = 0; row < rows; row++) {
      int8_t* high = parts.data() + (2 * (row / ROWS) * ROWS + row % ROWS) * stride;
      scales[row] = round_row(x + row * x_stride, K, high, high + ROWS * stride);
    }
  }

 private:
  // Returns the scale; where a number is not finite, that is NaN.
  static float round_row(const float* x, int K, int8_t* high, int8_t* low) {
    Floats largest = {}, odd = {};
    for (int k = 0; k < K; k += WIDTH) {
      const Floats value = load(x + k), size = (Floats)((Ints)value & 0x7fffffff);
      largest = size > largest ? size : largest;
      odd += value * 0.0f;
    }
    const float peak = max(largest), per_step = peak > 0 ? HIGHEST / peak : 0;
    for (int k = 0; k < K; k += WIDTH) {
      const Ints q = (Ints)_mm512_cvtps_epi32((__m512)(load(x + k) * per_step));
      const Ints above = (q + 128) >> 8;
      _mm_storeu_si128((__m128i*)(high + k), _mm512_cvtepi32_epi8((__m512i)above));
      _mm_storeu_si128((__m128i*)(low + k), _mm512_cvtepi32_epi8((__m512i)(q - (above << 8))));
    }
    for (int k = K; k < ceil_to(K, TURN); k++) high[k] = low[k] = 0;
    return peak / HIGHEST + sum(odd);
  }
};

#if defined(__AMX_INT8__)
INLINE bool begin(int rows) {
  if (!matrix_units()) return false;
  TileShapes shapes;
  for (int t = 0; t < 8; t++) {
    shapes.row_bytes[t] = 64;
    shapes.rows[t] = t == 5 || t == 6 ? ROWS : std::min(rows, ROWS);
  }
  _tile_loadconfig(&shapes);
  return true;
}

// Up to ROWS rows times a block of weights.
static void multiply_tiles(const int8_t* x, ptrdiff_t stride, const Matrix<Quad>& w, int b,
                           Sums& sums) {
  constexpr ptrdiff_t ROW_BYTES = BLOCK * sizeof(Quad);
  const Quad* p = w.blocks + b * w.pitch();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int k = 0; k < w.stored; k += TURN, p += ROWS * BLOCK) {
    _tile_loadd(4, x + k, stride);
    _tile_loadd(5, p, ROW_BYTES);
    _tile_loadd(6, p + WIDTH, ROW_BYTES);
    _tile_loadd(7, x + ROWS * stride + k, stride);
    _tile_dpbssd(0, 4, 5);
    _tile_dpbssd(1, 4, 6);
    _tile_dpbssd(2, 7, 5);
    _tile_dpbssd(3, 7, 6);
    prefetch_lines(p + 2 * ROWS * BLOCK);
  }
  _tile_stored(0, sums[0][0], sizeof sums[0][0]);
  _tile_stored(1, sums[0][0] + WIDTH, sizeof sums[0][0]);
  _tile_stored(2, sums[1][0], sizeof sums[0][0]);
  _tile_stored(3, sums[1][0] + WIDTH, sizeof sums[0][0]);
}

INLINE void end() { _tile_release(); }
#else
INLINE bool begin(int) { return false; }
INLINE void multiply_tiles(const int8_t*, ptrdiff_t, const Matrix<Quad>&, int, Sums&) {}
INLINE void end() {}
#endif

// The same with vectors. The unit wants weights without a sign: 128 is added to each, and 128 times
// the sum of x taken off.
template <int COUNT>
static void multiply_rows(const int8_t* x, ptrdiff_t stride, const Matrix<Quad>& w, int b,
                          int32_t (*sums)[BLOCK]) {
  Ints totals[COUNT][2] = {};
  const Quad* p = w.blocks + b * w.pitch();
  const __m512i signs = _mm512_set1_epi8((char)128);
  for (int k = 0; k < w.stored; k += 4, p += BLOCK) {
    __builtin_prefetch(p + PREFETCH * BLOCK / 2);
    __builtin_prefetch(p + PREFETCH * BLOCK / 2 + WIDTH);
    const __m512i left = _mm512_xor_si512(_mm512_loadu_si512(p), signs);
    const __m512i right = _mm512_xor_si512(_mm512_loadu_si512(p + WIDTH), signs);
#pragma GCC unroll 16
    for (int row = 0; row < COUNT; row++) {
      int32_t four;
      std::memcpy(&four, x + row * stride + k, 4);
      const __m512i value = _mm512_set1_epi32(four);
      totals[row][0] = (Ints)_mm512_dpbusd_epi32((__m512i)totals[row][0], left, value);
      totals[row][1] = (Ints)_mm512_dpbusd_epi32((__m512i)totals[row][1], right, value);
    }
  }
  for (int row = 0; row < COUNT; row++) {
    __m512i added = _mm512_setzero_si512();
    for (int k = 0; k < w.stored; k += TURN)
      added = _mm512_dpbusd_epi32(added, signs, _mm512_loadu_si512(x + row * stride + k));
    const Ints offset = (Ints)_mm512_set1_epi32(_mm512_reduce_add_epi32(added));
    *(Ints*)sums[row] = totals[row][0] - offset;
    *(Ints*)(sums[row] + WIDTH) = totals[row][1] - offset;
  }
}

}  // namespace int8
#endif

static void multiply(const float* x, ptrdiff_t x_stride, int rows, const Matrix<Quad>& w, int from,
                     int to, float* out, ptrdiff_t out_stride, bool add) {
#if defined(__AVX512VNNI__)
  static thread_local int8::Rows rounded;
  rounded.round(x, x_stride, rows, w.K);
  const ptrdiff_t stride = rounded.stride;
  const bool tiles = int8::begin(rows);
  alignas(64) int8::Sums sums;
  for (int b = from; b < to; b++)
    for (int first = 0; first < rows; first += int8::ROWS) {
      const int count = std::min(int8::ROWS, rows - first);
      const int8_t* part = rounded.of(first);
      if (tiles)
        int8::multiply_tiles(part, stride, w, b, sums);
      else
        for (int low = 0; low < 2; low++)
          in_chunks(count, [&](int start, int some) {
            with_rows(some, [&](auto constant) {
              int8::multiply_rows<constant.value>(part + (low * int8::ROWS + start) * stride,
                                                  stride, w, b, sums[low] + start);
            });
          });
      for (int row = 0; row < count; row++)
        for (int half = 0; half < BLOCK; half += WIDTH) {
          const Floats high = __builtin_convertvector(*(const Ints*)(sums[0][row] + half), Floats);
          const Floats low = __builtin_convertvector(*(const Ints*)(sums[1][row] + half), Floats);
          finish(Output{out, out_stride, w.bias, w.scale, add}, first + row, b * BLOCK + half,
                 (high * 256.0f + low) * rounded.scales[first + row]);
        }
    }
  if (tiles) int8::end();
#else
  multiply<Quad>(x, x_stride, rows, w, from, to, out, out_stride, add);
#endif
}
