// Products of a few rows with a large matrix: what a decoding step consists of.
//
// A matrix is stored in blocks of 32 columns, `block[k][column]`, so that a product streams it once,
// front to back, while up to MAX_ROWS rows of accumulators stay in registers. Every output is summed
// over k in ascending order, whatever the number of rows: results do not depend on how many lanes
// share a step, and raster and diagonal steps that see the same tokens compute the same bits.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

typedef float Floats __attribute__((vector_size(64), aligned(4)));  // 16 numbers, any address
typedef int32_t Ints __attribute__((vector_size(64), aligned(4)));
typedef uint16_t Shorts __attribute__((vector_size(32), aligned(2)));
typedef int8_t Bytes __attribute__((vector_size(16), aligned(1)));
typedef uint16_t bf16;
struct Pair {  // two bfloat16 weights of one column, for k and k + 1: what the matrix units take
  bf16 even, odd;
};

constexpr int WIDTH = 16, BLOCK = 32, PREFETCH = 64;  // columns, columns, values of k
#if defined(__AVX512F__)
constexpr int MAX_ROWS = 14;
#else
constexpr int MAX_ROWS = 4;
#endif
#define INLINE inline __attribute__((always_inline))

INLINE int ceil_to(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

INLINE Floats splat(float x) { return x - Floats{}; }
INLINE Floats load(const float* p) { return *(const Floats*)p; }
#if defined(__AVX512F__)  // compilers spell the widening below in several instructions
INLINE Floats load(const bf16* p) {
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
}
INLINE Floats load(const int8_t* p) {
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
#else
INLINE Floats load(const bf16* p) {
  return (Floats)(__builtin_convertvector(*(const Shorts*)p, Ints) << 16);
}
INLINE Floats load(const int8_t* p) { return __builtin_convertvector(*(const Bytes*)p, Floats); }
#endif
INLINE void store(float* p, Floats x) { *(Floats*)p = x; }

INLINE bf16 round_to_bf16(float x) {  // to nearest, ties to even; finite numbers only
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
INLINE void put(float* p, float x) { *p = x; }
INLINE void put(bf16* p, float x) { *p = round_to_bf16(x); }

// e^x to 2 ulp; below -87 it is e^-87, which callers treat as zero by masking.
INLINE Floats exp(Floats x) {
  x = x < -87.0f ? splat(-87.0f) : x > 88.0f ? splat(88.0f) : x;
  const Floats magic = splat(12582912.0f), shifted = x * 1.44269504f + magic;  // rounds
  const Floats n = shifted - magic;
  const Floats r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Floats p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return (Floats)((Ints)p + (((Ints)shifted - (Ints)magic) << 23));
}

INLINE float sum(Floats x) {
  float total = 0;
  for (int i = 0; i < WIDTH; i++) total += x[i];
  return total;
}

INLINE float max(Floats x) {
  float highest = x[0];
  for (int i = 1; i < WIDTH; i++) highest = x[i] > highest ? x[i] : highest;
  return highest;
}

// Where a product goes: out = (or +=) scale * x W + bias. Scales and biases may be null.
struct Output {
  float* to;
  ptrdiff_t stride;
  const float *bias, *scale;
  bool add;
};

INLINE void finish(const Output& out, int row, int column, Floats value) {
  float* to = out.to + row * out.stride + column;
  if (out.scale) {
    value *= load(out.scale + column);
    __asm__("" : "+m"(value));  // or it is fused with an addition in some tiles and not in others
  }
  if (out.bias) value += load(out.bias + column);
  store(to, out.add ? load(to) + value : value);
}

// ROWS x (32 * BLOCKS) outputs; `stride` between values of k, `pitch` between blocks.
template <int ROWS, int BLOCKS, class T>
static void tile(const float* x, ptrdiff_t x_stride, const T* w, ptrdiff_t stride, ptrdiff_t pitch,
                 int K, const Output& out, int column) {
  Floats sums[ROWS][BLOCKS * 2] = {};
  for (int k = 0; k < K; k++) {
    Floats weights[BLOCKS * 2];
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS * 2; b++) {
      const T* p = w + (b / 2) * pitch + k * stride + (b % 2) * WIDTH;
      __builtin_prefetch(p + PREFETCH * stride);
      weights[b] = load(p);
    }
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++) {
      const Floats value = splat(x[row * x_stride + k]);
#pragma GCC unroll 8
      for (int b = 0; b < BLOCKS * 2; b++) sums[row][b] += value * weights[b];
    }
  }
  for (int row = 0; row < ROWS; row++)
    for (int b = 0; b < BLOCKS * 2; b++) finish(out, row, column + b * WIDTH, sums[row][b]);
}

// The same for weights in pairs: rows of 32 pairs, `stride` and `pitch` in pairs.
template <int ROWS, int BLOCKS>
static void tile(const float* x, ptrdiff_t x_stride, const Pair* w, ptrdiff_t stride,
                 ptrdiff_t pitch, int K, const Output& out, int column) {
  Floats sums[ROWS][BLOCKS * 2] = {};
  for (int k = 0; k < K; k += 2)
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS * 2; b++) {
      const Pair* p = w + (b / 2) * pitch + k / 2 * stride + (b % 2) * WIDTH;
      __builtin_prefetch(p + PREFETCH * stride);
      const Ints pairs = *(const Ints*)p;
      const Floats even = (Floats)(pairs << 16), odd = (Floats)(pairs & (int32_t)0xffff0000);
#pragma GCC unroll 16
      for (int row = 0; row < ROWS; row++) {
        sums[row][b] += splat(x[row * x_stride + k]) * even;
        sums[row][b] += splat(x[row * x_stride + k + 1]) * odd;
      }
    }
  for (int row = 0; row < ROWS; row++)
    for (int b = 0; b < BLOCKS * 2; b++) finish(out, row, column + b * WIDTH, sums[row][b]);
}

template <class T>
struct Matrix {  // blocks[num_blocks][K][32], or of pairs [num_blocks][K / 2][32]
  const T* blocks;
  int K;
  const float *bias, *scale;
};

template <int ROWS, class T>
static void tiles(const float* x, ptrdiff_t x_stride, const Matrix<T>& w, int from, int to,
                  Output out) {
  constexpr int GROUP = ROWS == 1 ? 4 : ROWS <= 3 ? 2 : 1;  // enough sums to hide their latency
  const ptrdiff_t pitch = (ptrdiff_t)w.K * BLOCK / (std::is_same_v<T, Pair> ? 2 : 1);
  int b = from;
  for (; b + GROUP <= to; b += GROUP)
    tile<ROWS, GROUP>(x, x_stride, w.blocks + b * pitch, BLOCK, pitch, w.K, out, b * BLOCK);
  for (; b < to; b++)
    tile<ROWS, 1>(x, x_stride, w.blocks + b * pitch, BLOCK, pitch, w.K, out, b * BLOCK);
}

// Calls f with the number of rows as a compile-time constant.
template <int ROWS = MAX_ROWS, class F>
INLINE void with_rows(int rows, F f) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS) return f(std::integral_constant<int, ROWS>());
    with_rows<ROWS - 1>(rows, f);
  }
}

// Calls f(first row, rows) on chunks of at most MAX_ROWS rows, as even as they come.
template <class F>
INLINE void in_chunks(int rows, F f) {
  const int chunks = (rows + MAX_ROWS - 1) / MAX_ROWS;
  for (int c = 0; c < chunks; c++) {
    const int first = rows * c / chunks;
    f(first, rows * (c + 1) / chunks - first);
  }
}

// The columns of blocks [from, to) of x W for all rows; weights outermost, so read once.
template <class T>
static void multiply(const float* x, ptrdiff_t x_stride, int rows, const Matrix<T>& w, int from,
                     int to, float* out, ptrdiff_t out_stride, bool add) {
  const int group = rows == 1 ? to - from : 4;
  for (int b = from; b < to; b += group)
    in_chunks(rows, [&](int first, int count) {
      with_rows(count, [&](auto constant) {
        tiles<constant.value>(x + first * x_stride, x_stride, w, b, std::min(b + group, to),
                              Output{out + first * out_stride, out_stride, w.bias, w.scale, add});
      });
    });
}

#if defined(__AMX_BF16__)
// Asks the kernel for the matrix units of this processor (AMX), once.
inline bool matrix_units() {
  static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  return granted;
}

struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// `rows` <= 16 rows of x (bfloat16, K a multiple of 32) times blocks b and, if `two`, b + 1.
static void multiply_block(const bf16* x, ptrdiff_t x_stride, int rows, const Matrix<Pair>& w,
                           int b, bool two, const Output& out) {
  const ptrdiff_t pitch = (ptrdiff_t)w.K * BLOCK / 2;
  const Pair* p = w.blocks + b * pitch;
  const ptrdiff_t row_bytes = BLOCK * sizeof(Pair);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int k = 0; k < w.K; k += 32, p += 16 * BLOCK) {
    _tile_loadd(4, x + k, x_stride * sizeof(bf16));
    _tile_loadd(5, p, row_bytes);
    _tile_loadd(6, p + WIDTH, row_bytes);
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 6);
    if (two) {
      _tile_loadd(5, p + pitch, row_bytes);
      _tile_loadd(6, p + pitch + WIDTH, row_bytes);
      _tile_dpbf16ps(2, 4, 5);
      _tile_dpbf16ps(3, 4, 6);
    }
    for (int line = 0; line < 32; line++)  // of the next turn but one
      __builtin_prefetch((const char*)(p + 32 * BLOCK) + line * 64);
  }
  float sums[4][16][WIDTH];
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  _tile_stored(2, sums[2], 64);
  _tile_stored(3, sums[3], 64);
  for (int row = 0; row < rows; row++)
    for (int t = 0; t < (two ? 4 : 2); t++)
      finish(out, row, b * BLOCK + t * WIDTH, load(sums[t][row]));
}

static void multiply_units(const float* x, ptrdiff_t x_stride, int rows, const Matrix<Pair>& w,
                           int from, int to, float* out, ptrdiff_t out_stride, bool add) {
  static thread_local std::vector<bf16> rounded;
  const ptrdiff_t stride = w.K + BLOCK;  // see `apart` in decoder.cpp
  if (rounded.size() < (size_t)rows * stride) rounded.resize(rows * stride);
  for (int row = 0; row < rows; row++)
    for (int k = 0; k < w.K; k += WIDTH)
      _mm256_storeu_si256((__m256i*)(rounded.data() + row * stride + k),
                          (__m256i)_mm512_cvtneps_pbh((__m512)load(x + row * x_stride + k)));
  for (int b = from; b < to; b += 2)
    for (int first = 0; first < rows; first += 16) {
      const int count = std::min(16, rows - first);
      TileShapes shapes;
      for (int t = 0; t < 7; t++) shapes.row_bytes[t] = 64, shapes.rows[t] = t < 5 ? count : 16;
      _tile_loadconfig(&shapes);
      multiply_block(rounded.data() + first * stride, stride, count, w, b, b + 1 < to,
                     Output{out + first * out_stride, out_stride, w.bias, w.scale, add});
    }
  _tile_release();
}
#endif

static void multiply(const float* x, ptrdiff_t x_stride, int rows, const Matrix<Pair>& w, int from,
                     int to, float* out, ptrdiff_t out_stride, bool add) {
#if defined(__AMX_BF16__)
  if (matrix_units()) return multiply_units(x, x_stride, rows, w, from, to, out, out_stride, add);
#endif
  multiply<Pair>(x, x_stride, rows, w, from, to, out, out_stride, add);
}
