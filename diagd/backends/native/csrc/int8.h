// Products with int8 weights, in whole numbers: activations become bytes, too, with a scale for each
// row. Sums of their products fit into 32 bits and are exact, so results depend neither on how many
// lanes share a step nor on which unit multiplies.
#pragma once
#include "bf16.h"

#if defined(__AVX512VNNI__)  // processors with matrix units have it, too
constexpr int GROUP = 16, TURN = 64;  // rows and values of k at a time

// What multiplies with vectors wants weights without a sign: 128 is added to each, and 128 times the sum
// of x, an offset for each row, taken off.
template <>
struct Input<Quad> {
  int rows;
  ptrdiff_t stride;
  int8_t* bytes;
  float* scales;
  int32_t* offsets;

  Input(const float* x, ptrdiff_t x_stride, int rows, int K)
      : rows(rows), stride(ceil_to(K, TURN) + TURN) {  // rows a power of two apart evict each other
    static thread_local std::vector<int8_t> memory;
    static thread_local std::vector<float> some_scales;
    static thread_local std::vector<int32_t> some_offsets;
    const size_t needed = ceil_to(rows, GROUP) * stride;
    if (memory.size() < needed) memory.resize(needed);
    if (some_scales.size() < (size_t)rows) some_scales.resize(rows), some_offsets.resize(rows);
    bytes = memory.data();
    scales = some_scales.data();
    offsets = some_offsets.data();
    for (int row = 0; row < rows; row++) {
      int8_t* to = bytes + row * stride;
      scales[row] = round(x + row * x_stride, K, to);
      __m512i sums = _mm512_setzero_si512();
      for (int k = 0; k < K; k += TURN)
        sums = _mm512_dpbusd_epi32(sums, signs(), _mm512_loadu_si512(to + k));
      offsets[row] = _mm512_reduce_add_epi32(sums);
    }
  }

  static __m512i signs() { return _mm512_set1_epi8((char)128); }

 private:
  // Returns the scale; where a number is not finite, sums times that are NaN.
  static float round(const float* x, int K, int8_t* to) {
    constexpr float HIGHEST = 127;
    const __m512i size = _mm512_set1_epi32(0x7fffffff);
    __m512i largest = _mm512_setzero_si512();  // as bits, among which NaN is above all numbers
    for (int k = 0; k < K; k += WIDTH)
      largest = _mm512_max_epi32(largest, _mm512_and_si512(_mm512_loadu_si512(x + k), size));
    const int32_t bits = _mm512_reduce_max_epi32(largest);
    float peak;
    std::memcpy(&peak, &bits, sizeof(peak));
    const float per_step = peak > 1e-30f ? HIGHEST / peak : 0;
    for (int k = 0; k < K; k += WIDTH) {
      const __m512i number = _mm512_cvtps_epi32((__m512)(load(x + k) * per_step));
      _mm_storeu_si128((__m128i*)(to + k), _mm512_cvtepi32_epi8(number));
    }
    std::memset(to + K, 0, ceil_to(K, TURN) - K);
    return peak / HIGHEST;
  }
};

typedef int32_t Sums[GROUP][BLOCK];  // by row and column

#if defined(MATRIX_UNITS)
INLINE bool begin_tiles(int rows) {
  if (!matrix_units()) return false;
  TileShapes shapes;
  for (int t = 0; t < 8; t++) {
    shapes.row_bytes[t] = 64;
    shapes.rows[t] = t >= 6 ? 16 : std::min(rows, GROUP);
  }
  _tile_loadconfig(&shapes);
  return true;
}

INLINE void end_tiles() { _tile_release(); }

// Tiles 0 and 1 are sums, 4 activations, the last ones weights.
static void multiply_tiles(const int8_t* x, ptrdiff_t stride, const Matrix<Quad>& w, int b,
                           Sums& sums) {
  constexpr int ROW = BLOCK * sizeof(Quad);
  const Quad* p = w.blocks + b * w.pitch();
  _tile_zero(0);
  _tile_zero(1);
  for (int k = 0; k < w.stored; k += TURN, p += 16 * BLOCK) {
    _tile_loadd(4, x + k, stride);
    _tile_loadd(6, p, ROW);
    _tile_loadd(7, p + WIDTH, ROW);
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    prefetch_lines(p + 32 * BLOCK, 32);  // of the next turn but one
  }
  _tile_stored(0, sums[0], ROW);
  _tile_stored(1, sums[0] + WIDTH, ROW);
}

#else
INLINE bool begin_tiles(int) { return false; }
INLINE void end_tiles() {}
static void multiply_tiles(const int8_t*, ptrdiff_t, const Matrix<Quad>&, int, Sums&) {}
#endif

// The same with vectors; put(row, column, sums) is called for each row and 16 columns.
template <int COUNT, class Put>
static void multiply_rows(const int8_t* x, ptrdiff_t stride, const int32_t* offsets,
                          const Matrix<Quad>& w, int b, Put put) {
  Ints totals[COUNT][2] = {};
  const Quad* p = w.blocks + b * w.pitch();
  const __m512i signs = Input<Quad>::signs();
  for (int k = 0; k < w.stored; k += 4, p += BLOCK) {
    prefetch_lines(p + PREFETCH / 2 * BLOCK, 2);
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
#pragma GCC unroll 16
  for (int row = 0; row < COUNT; row++) {
    put(row, 0, totals[row][0] - offsets[row]);
    put(row, WIDTH, totals[row][1] - offsets[row]);
  }
}

template <>
void multiply(const Input<Quad>& in, const Matrix<Quad>& w, int from, int to, float* out,
              ptrdiff_t out_stride, bool add) {
  const Output output{out, out_stride, w.bias, w.scale, add};
  const bool tiles = begin_tiles(in.rows);
  for (int b = from; b < to; b++)
    for (int first = 0; first < in.rows; first += GROUP) {
      const int8_t* bytes = in.bytes + first * in.stride;
      const auto put = [&](int row, int at, Ints sum) {
        finish(output, first + row, b * BLOCK + at,
               __builtin_convertvector(sum, Floats) * in.scales[first + row]);
      };
      const int count = std::min(GROUP, in.rows - first);
      if (tiles) {
        alignas(64) Sums sums;
        multiply_tiles(bytes, in.stride, w, b, sums);
        for (int row = 0; row < count; row++)
          for (int at = 0; at < BLOCK; at += WIDTH) put(row, at, *(const Ints*)(sums[row] + at));
        continue;
      }
      in_chunks(count, [&](int start, int some) {
        with_rows(some, [&](auto constant) {
          multiply_rows<constant.value>(
              bytes + start * in.stride, in.stride, in.offsets + first + start, w, b,
              [&](int row, int at, Ints sum) { put(start + row, at, sum); });
        });
      });
    }
  if (tiles) end_tiles();
}
#endif
