// Products in whole numbers: activations and weights become numbers of so many parts of 8 bits.
//
// A row of activations and a column of weights have a scale each, and their numbers are a, 256 a + b,
// 65536 a + 256 b + c, ... Sums of products of parts fit into 32 bits and are exact, so results depend
// neither on how many lanes share a step nor on which unit multiplies. int8 weights have one part,
// and activations two then. float32 weights have three, so they take three bytes instead of four;
// activations have four then, since what is small beside the largest of a row may matter, and of the
// products those that count less than the last part are left out.
#pragma once
#include "kernels.h"

// float32 weights of 16 columns: for 64 successive k, one tile (16 rows of 16 quads) a part.
struct Fixed {
  Quad part[3];
};

#if defined(__AVX512VNNI__)  // processors with matrix units have it, too
constexpr int GROUP = 16, TURN = 64;  // rows and values of k at a time

// Rows of activations in groups: the first parts of a group, then its second ones, and so on.
template <int PARTS>
struct Parts {
  int rows;
  ptrdiff_t stride;
  int8_t* numbers;
  float* scales;

  Parts(const float* x, ptrdiff_t x_stride, int rows, int K)
      : rows(rows), stride(ceil_to(K, TURN) + TURN) {  // rows a power of two apart evict each other
    static thread_local std::vector<int8_t> memory;
    static thread_local std::vector<float> more;
    const size_t needed = PARTS * ceil_to(rows, GROUP) * stride;
    if (memory.size() < needed) memory.resize(needed);
    if (more.size() < (size_t)rows) more.resize(rows);
    numbers = memory.data();
    scales = more.data();
    for (int row = 0; row < rows; row++)
      scales[row] = split(x + row * x_stride, K,
                          numbers + (PARTS * (row / GROUP) * GROUP + row % GROUP) * stride);
  }

  const int8_t* group(int first) const { return numbers + PARTS * first * stride; }

 private:
  static constexpr float HIGHEST = 127 << 8 * (PARTS - 1);  // of four parts: below 2^31

  // Returns what the last part counts; where a number is not finite, that is NaN.
  float split(const float* x, int K, int8_t* to) const {
    Floats largest = {}, odd = {};
    for (int k = 0; k < K; k += WIDTH) {
      const Floats value = load(x + k), size = (Floats)((Ints)value & 0x7fffffff);
      largest = size > largest ? size : largest;
      odd += value * 0.0f;
    }
    const float peak = max(largest), per_step = peak > 1e-28f ? HIGHEST / peak : 0;
    for (int k = 0; k < K; k += WIDTH) {
      Ints rest = (Ints)_mm512_cvtps_epi32((__m512)(load(x + k) * per_step));
      for (int part = PARTS - 1; part >= 0; part--) {
        const Ints above = (rest + 128) >> 8;
        _mm_storeu_si128((__m128i*)(to + part * GROUP * stride + k),
                         _mm512_cvtepi32_epi8((__m512i)(part ? rest - (above << 8) : rest)));
        rest = above;
      }
    }
    for (int part = 0; part < PARTS; part++)
      std::memset(to + part * GROUP * stride + K, 0, ceil_to(K, TURN) - K);
    return peak / HIGHEST + sum(odd);
  }
};

// sums[order][row][column]: products of parts whose numbers, counted from 0, add up to `order`.
template <int ORDERS, int COLUMNS>
using Sums = int32_t[ORDERS][GROUP][COLUMNS];

#if defined(__AMX_INT8__)
INLINE bool begin_tiles(int rows, int first_of_weights) {
  if (!matrix_units()) return false;
  TileShapes shapes;
  for (int t = 0; t < 8; t++) {
    shapes.row_bytes[t] = 64;
    shapes.rows[t] = t >= first_of_weights ? 16 : std::min(rows, GROUP);
  }
  _tile_loadconfig(&shapes);
  return true;
}

INLINE void end_tiles() { _tile_release(); }

// Tiles 0 to 3 are sums, the next ones activations, the last ones weights.
static void multiply_tiles(const int8_t* x, ptrdiff_t stride, const Matrix<Quad>& w, int column,
                           Sums<2, 32>& sums) {
  constexpr int ROW = BLOCK * sizeof(Quad);
  const Quad* p = w.blocks + column / BLOCK * w.pitch();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int k = 0; k < w.stored; k += TURN, p += 16 * BLOCK) {
    _tile_loadd(4, x + k, stride);
    _tile_loadd(5, x + GROUP * stride + k, stride);
    _tile_loadd(6, p, ROW);
    _tile_loadd(7, p + WIDTH, ROW);
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
    prefetch_lines(p + 32 * BLOCK, 32);  // of the next turn but one
  }
  _tile_stored(0, sums[0][0], ROW);
  _tile_stored(1, sums[0][0] + WIDTH, ROW);
  _tile_stored(2, sums[1][0], ROW);
  _tile_stored(3, sums[1][0] + WIDTH, ROW);
}

static void multiply_tiles(const int8_t* x, ptrdiff_t stride, const Matrix<Fixed>& w, int column,
                           Sums<4, 16>& sums) {
  constexpr int TILE = 16 * WIDTH, ROW = WIDTH * sizeof(Quad);
  const Quad* p = (const Quad*)w.blocks + (ptrdiff_t)column * w.stored / 4 * 3;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int k = 0; k < w.stored; k += TURN, p += 3 * TILE) {  // prefetching would slow it down
    _tile_loadd(4, x + k, stride);
    _tile_loadd(5, x + GROUP * stride + k, stride);
    _tile_loadd(6, x + 2 * GROUP * stride + k, stride);
    _tile_loadd(7, p + TILE, ROW);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 7);
    _tile_dpbssd(3, 6, 7);
    _tile_loadd(7, p + 2 * TILE, ROW);
    _tile_dpbssd(2, 4, 7);
    _tile_dpbssd(3, 5, 7);
    _tile_loadd(7, p, ROW);
    _tile_dpbssd(0, 4, 7);
    _tile_dpbssd(1, 5, 7);
    _tile_dpbssd(2, 6, 7);
    _tile_loadd(4, x + 3 * GROUP * stride + k, stride);
    _tile_dpbssd(3, 4, 7);
  }
  _tile_stored(0, sums[0], ROW);
  _tile_stored(1, sums[1], ROW);
  _tile_stored(2, sums[2], ROW);
  _tile_stored(3, sums[3], ROW);
}
#else
INLINE bool begin_tiles(int, int) { return false; }
INLINE void end_tiles() {}
template <class T, int ORDERS, int COLUMNS>
static void multiply_tiles(const int8_t*, ptrdiff_t, const Matrix<T>&, int, Sums<ORDERS, COLUMNS>&) {}
#endif

// The same with vectors. What multiplies wants weights without a sign: 128 is added to each, and 128
// times the sum of x taken off.
template <int COUNT>
static void multiply_rows(const int8_t* x, ptrdiff_t stride, const Matrix<Quad>& w, int column,
                          int32_t (*sums)[BLOCK]) {
  Ints totals[COUNT][2] = {};
  const Quad* p = w.blocks + column / BLOCK * w.pitch();
  const __m512i signs = _mm512_set1_epi8((char)128);
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
  for (int row = 0; row < COUNT; row++) {
    __m512i added = _mm512_setzero_si512();
    for (int k = 0; k < w.stored; k += TURN)
      added = _mm512_dpbusd_epi32(added, signs, _mm512_loadu_si512(x + row * stride + k));
    const Ints offset = (Ints)_mm512_set1_epi32(_mm512_reduce_add_epi32(added));
    *(Ints*)sums[row] = totals[row][0] - offset;
    *(Ints*)(sums[row] + WIDTH) = totals[row][1] - offset;
  }
}

static void multiply_vectors(const int8_t* x, ptrdiff_t stride, int count, const Matrix<Quad>& w,
                             int column, Sums<2, 32>& sums) {
  for (int part = 0; part < 2; part++)
    in_chunks(count, [&](int first, int some) {
      with_rows(some, [&](auto constant) {
        multiply_rows<constant.value>(x + (part * GROUP + first) * stride, stride, w, column,
                                      sums[part] + first);
      });
    });
}

template <int ORDERS, int COLUMNS, class T>
static void multiply_parts(const Parts<ORDERS>& in, const Matrix<T>& w, int from, int to,
                           const Output& out) {
  const bool tiles = begin_tiles(in.rows, std::is_same_v<T, Fixed> ? 7 : 6);
  alignas(64) Sums<ORDERS, COLUMNS> sums;
  for (int column = from * BLOCK; column < to * BLOCK; column += COLUMNS)
    for (int first = 0; first < in.rows; first += GROUP) {
      const int count = std::min(GROUP, in.rows - first);
      if constexpr (std::is_same_v<T, Fixed>)
        multiply_tiles(in.group(first), in.stride, w, column, sums);
      else if (tiles)
        multiply_tiles(in.group(first), in.stride, w, column, sums);
      else
        multiply_vectors(in.group(first), in.stride, count, w, column, sums);
      for (int row = 0; row < count; row++)
        for (int at = 0; at < COLUMNS; at += WIDTH) {
          Floats total = {};
          for (int order = 0; order < ORDERS; order++) {
            const Ints exact = *(const Ints*)(sums[order][row] + at);
            total = total * 256.0f + __builtin_convertvector(exact, Floats);
          }
          finish(out, first + row, column + at, total * in.scales[first + row]);
        }
    }
  if (tiles) end_tiles();
}

template <>
struct Input<Quad> : Parts<2> {
  using Parts::Parts;
};

template <>
void multiply(const Input<Quad>& in, const Matrix<Quad>& w, int from, int to, float* out,
              ptrdiff_t out_stride, bool add) {
  multiply_parts<2, 32>(in, w, from, to, {out, out_stride, w.bias, w.scale, add});
}
#endif

#if defined(__AMX_INT8__)
template <>
struct Input<Fixed> : Parts<4> {
  using Parts::Parts;
};

template <>
void multiply(const Input<Fixed>& in, const Matrix<Fixed>& w, int from, int to, float* out,
              ptrdiff_t out_stride, bool add) {
  multiply_parts<4, 16>(in, w, from, to, {out, out_stride, w.bias, w.scale, add});
}
#endif
