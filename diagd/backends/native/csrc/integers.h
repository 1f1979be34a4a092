// Products of whole numbers: weights of 8 bits with activations of one digit of 7 bits or two, keys
// of 12 bits with queries of 12, and values of 10 with weights of softmax of 13. Floats become
// whole numbers row by row, each with a scale of its own. Sums are exact, so the results are the
// same bits on every processor, however many lanes share a step and whichever unit multiplies.
#pragma once
#include "bf16.h"

INLINE float steps_to(float highest, float peak) { return peak > 1e-30f ? highest / peak : 0; }

// Makes whole numbers of up to `highest` in magnitude of a row, calls put(k, numbers) with them,
// and returns the scale; where a number is not finite, sums times that are NaN.
template <class Put>
INLINE float round_row(const float* x, int K, float highest, Put put) {
  Ints largest = {};
  for (int k = 0; k < K; k += WIDTH) largest = greater((Ints)load(x + k) & 0x7fffffff, largest);
  const float peak = max_of_bits(largest), per_step = steps_to(highest, peak);
  for (int k = 0; k < K; k += WIDTH) put(k, to_ints(load(x + k) * per_step));
  return peak / highest;
}

// Rows of whole numbers of N bytes, with their scales.
template <class N>
struct Rounded {
  ptrdiff_t stride;
  int rows;
  N* x;
  float* scales;

  // Rows a power of two apart would evict each other.
  Rounded(int rows, int K) : stride(K + 64), rows(rows) {
    static thread_local std::vector<N> numbers;
    static thread_local std::vector<float> some_scales;
    make_room(numbers, (uint64_t)ceil_to(rows, 16) * stride);  // the matrix units take 16 rows
    make_room(some_scales, rows);
    x = numbers.data(), scales = some_scales.data();
  }
};

// Digits of 7 bits, the second one in a row below the first: where a number of a row is much larger
// than the rest, one digit keeps little of those. 64 is added to each, so it has no sign; the
// blocks of weights begin with what that adds to the sums, taken off.
template <>
struct Input<Quad> : Rounded<int8_t> {
  const int digits;

  Input(const float* from, ptrdiff_t from_stride, int count, int K, int digits = 1)
      : Rounded(count * digits, ceil_to(K, 64)), digits(digits) {
    constexpr int HIGHEST = 63;
    for (int row = 0; row < count; row++, from += from_stride) {
      int8_t *first = x + row * digits * stride, *second = first + stride;
      if (digits == 1)
        scales[row] = round_row(from, K, HIGHEST,
                                [&](int k, Ints numbers) { put_bytes(first + k, numbers + 64); });
      else
        scales[row] =
            DIGIT * round_row(from, K, HIGHEST * DIGIT, [&](int k, Ints numbers) {
              const Ints high = to_ints(to_floats(numbers) * (1.0f / DIGIT));
              put_bytes(first + k, high + 64);
              put_bytes(second + k, numbers - high * DIGIT + 64);  // at most DIGIT / 2 in magnitude
            });
      for (int digit = 0; digit < digits; digit++)
        std::memset(first + digit * stride + K, 64, ceil_to(K, 64) - K);
    }
  }
  static void reserve(int rows, int K) { Rounded(rows, ceil_to(K, 64)); }
};

// MAX_DUOS products of a query and a key, or of a weight of softmax and a value, are less than
// 2^31.
constexpr int MAX_DUOS = 512;
constexpr float HIGHEST_KEY = 2047, HIGHEST_VALUE = 511, HIGHEST_WEIGHT = 8191;

template <>
struct Input<Duo> : Rounded<int16_t> {  // queries
  Input(const float* from, ptrdiff_t from_stride, int rows, int K) : Rounded(rows, K) {
    for (int row = 0; row < rows; row++) {
      int16_t* to = x + row * stride;
      scales[row] = round_row(from + row * from_stride, K, HIGHEST_KEY,
                              [&](int k, Ints numbers) { put_shorts(to + k, numbers); });
    }
  }
  static void reserve(int rows, int K) { Rounded(rows, K); }
};

#if defined(MATRIX_UNITS)
// Tiles 0 and 1 are sums, 4 activations, the last ones weights.
static void multiply_tiles(const Input<Quad>& in, const Matrix<Quad>& w, int from, int to,
                           const Output& out) {
  constexpr int ROW = BLOCK * sizeof(Quad), TURN = 64;  // bytes, values of k at a time
  TileShapes shapes;
  for (int t = 0; t < 8; t++) {
    shapes.row_bytes[t] = 64;
    shapes.rows[t] = t >= 6 ? 16 : std::min(in.rows, 16);
  }
  _tile_loadconfig(&shapes);
  alignas(64) int32_t sums[16][BLOCK];
  for (int b = from; b < to; b++)
    for (int first = 0; first < in.rows; first += 16) {
      const Quad* p = w.column(b * BLOCK);
      _tile_loadd(0, p, 0);  // the first row, for each
      _tile_loadd(1, p + LINE, 0);
      p += BLOCK;
      for (int k = 0; k < w.stored; k += TURN, p += TURN / 4 * BLOCK) {
        _tile_loadd(4, in.x + first * in.stride + k, in.stride);
        _tile_loadd(6, p, ROW);
        _tile_loadd(7, p + LINE, ROW);
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        prefetch_lines(p + TURN / 2 * BLOCK, 32);  // of the next turn but one
      }
      _tile_stored(0, sums[0], ROW);
      _tile_stored(1, sums[0] + LINE, ROW);
      const Output here = out.from(first);
      for (int row = 0; row < std::min(16, in.rows - first); row += in.digits)
        for (int at = 0; at < BLOCK; at += LINE) {
          const Ints high = *(const Ints*)(sums[row] + at);
          if (in.digits == 1)
            finish(here, row, b * BLOCK + at, high);
          else
            finish(here, row / 2, b * BLOCK + at, high, *(const Ints*)(sums[row + 1] + at));
        }
    }
  _tile_release();
}
#else
static void multiply_tiles(const Input<Quad>&, const Matrix<Quad>&, int, int, const Output&) {}
#endif

template <>
void multiply(const Input<Quad>& in, const Matrix<Quad>& w, int from, int to, float* out,
              ptrdiff_t out_stride, bool add) {
  const Output output{out, out_stride, w.bias, w.scale, add, in.scales, in.digits};
  if (matrix_units())
    multiply_tiles(in, w, from, to, output);
  else
    multiply_vectors(in.x, in.stride, in.rows, w, from, to, output);
}

template <>
void multiply(const Input<Duo>& in, const Matrix<Duo>& w, int from, int to, float* out,
              ptrdiff_t out_stride, bool add) {
  multiply_vectors(in.x, in.stride, in.rows, w, from, to,
                   {out, out_stride, w.bias, w.scale, add, in.scales});
}
