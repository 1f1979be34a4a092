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
#if defined(__AVX512BF16__)
#define BF16_DOTS  // products of pairs of bfloat16
#endif
#if defined(BF16_DOTS) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#define MATRIX_UNITS  // AMX; other systems grant it in other ways, which nobody has tried
#include <sys/syscall.h>
#include <unistd.h>
#endif

typedef float Floats __attribute__((vector_size(64), aligned(4)));  // 16 numbers, any address
typedef int32_t Ints __attribute__((vector_size(64), aligned(4)));
typedef uint16_t Shorts __attribute__((vector_size(32), aligned(2)));
typedef uint16_t bf16;
// Weights of one column for successive k: what the matrix units take.
struct Pair {
  bf16 at[2];
};
struct Quad {
  int8_t at[4];
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
#else
INLINE Floats load(const bf16* p) {
  return (Floats)(__builtin_convertvector(*(const Shorts*)p, Ints) << 16);
}
#endif
// Weight `j` of 16 columns.
INLINE Floats unpack(const float* p, int) { return load(p); }
INLINE Floats unpack(const Pair* p, int j) {
  const Ints pairs = *(const Ints*)p;
  return (Floats)(j ? pairs & (int32_t)0xffff0000 : pairs << 16);
}
INLINE Floats unpack(const Quad* p, int j) {
  return __builtin_convertvector(*(const Ints*)p << (24 - 8 * j) >> 24, Floats);
}
INLINE void store(float* p, Floats x) { *(Floats*)p = x; }
// An activation for 16 columns, and their sums plus its product with their weights.
INLINE Floats spread(const float* x) { return splat(*x); }
INLINE void add_product(Floats& sums, const float*, Floats x, Floats weights) { sums += x * weights; }
#if defined(BF16_DOTS)  // two activations, and a pair of weights a column
INLINE Floats spread(const bf16* x) {
  int32_t pair;
  std::memcpy(&pair, x, sizeof(pair));
  return (Floats)_mm512_set1_epi32(pair);
}
INLINE void add_product(Floats& sums, const bf16*, Floats x, Floats weights) {
  sums = (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)x, (__m512bh)weights);
}
#endif

INLINE void prefetch_lines(const void* p, int lines) {
  for (int line = 0; line < lines; line++) __builtin_prefetch((const char*)p + line * 64);
}

INLINE bf16 round_to_bf16(float x) {  // to nearest, ties to even; finite numbers only
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
INLINE void put(float* p, float x) { *p = x; }
INLINE void put(bf16* p, float x) { *p = round_to_bf16(x); }

// 2^x to 3 ulp for x below 127; 0 where it would be less than 2^-126: such numbers are slow. NaN stays
// NaN, so that what went wrong in attention is seen in the logits.
INLINE Floats exp2(Floats x) {
#if defined(__AVX512F__)
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126), _CMP_NLT_UQ);
  const __m512 n = _mm512_roundscale_ps((__m512)x, 8);
  const Floats r = x - (Floats)n;
#else
  const Floats clamped = x < -126.0f ? splat(-126.0f) : x;
  const Floats magic = splat(12582912.0f), shifted = clamped + magic;  // rounds
  const Floats r = clamped - (shifted - magic);
#endif
  Floats p = splat(1.3264726e-3f);
  p = p * r + 9.6715127e-3f;
  p = p * r + 5.5507337e-2f;
  p = p * r + 2.4022242e-1f;
  p = p * r + 6.9314698e-1f;
  p = p * r + 1.0f;
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_scalef_ps(normal, (__m512)p, n);
#else
  return x < -126.0f ? Floats{} : (Floats)((Ints)p + (((Ints)shifted - (Ints)magic) << 23));
#endif
}

constexpr float LOG2_E = 1.44269504f;
// e^x for any x, to 3 ulp and a rounding of x.
INLINE Floats exp(Floats x) { return exp2(x < 88.0f ? x * LOG2_E : splat(88 * LOG2_E)); }

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
  bool plain() const { return !bias && !scale && !add; }
  Output from(int row) const { return {to + row * stride, stride, bias, scale, add}; }
};

INLINE void finish(const Output& out, int row, int column, Floats value) {
  float* to = out.to + row * out.stride + column;
  if (out.scale) {
    value *= load(out.scale + column);
    // not to be fused with an addition in some tiles and not in others
#if defined(__AVX512F__)
    __asm__("" : "+v"(value));
#else
    __asm__("" : "+m"(value));
#endif
  }
  if (out.bias) value += load(out.bias + column);
  store(to, out.add ? load(to) + value : value);
}

template <class T>  // weights in a T
constexpr int PACKED = std::is_same_v<T, float> ? 1 : std::is_same_v<T, Pair> ? 2 : 4;

// ROWS x (32 * BLOCKS) outputs of floats, or of bfloat16 and Pairs; `stride` between Ts of successive k,
// `pitch` between blocks.
template <int ROWS, int BLOCKS, class X, class T>
static void tile(const X* x, ptrdiff_t x_stride, const T* w, ptrdiff_t stride, ptrdiff_t pitch,
                 int K, const Output& out, int column) {
  constexpr int TURNS = std::is_same_v<X, float> ? PACKED<T> : 1;
  Floats sums[ROWS][BLOCKS * 2] = {};
  for (int k = 0; k < K; k += PACKED<T>) {
#pragma GCC unroll 4
    for (int j = 0; j < TURNS; j++) {
      Floats weights[BLOCKS * 2];
#pragma GCC unroll 8
      for (int b = 0; b < BLOCKS * 2; b++) {
        const T* p = w + (b / 2) * pitch + k / PACKED<T> * stride + (b % 2) * WIDTH;
        if (!j) __builtin_prefetch(p + PREFETCH * stride);
        weights[b] = TURNS == PACKED<T> ? unpack(p, j) : load((const float*)p);
      }
#pragma GCC unroll 16
      for (int row = 0; row < ROWS; row++) {
        const Floats value = spread(x + row * x_stride + k + j);
#pragma GCC unroll 8
        for (int b = 0; b < BLOCKS * 2; b++) add_product(sums[row][b], x, value, weights[b]);
      }
    }
  }
  for (int row = 0; row < ROWS; row++)
    for (int b = 0; b < BLOCKS * 2; b++) finish(out, row, column + b * WIDTH, sums[row][b]);
}

template <class T>
struct Matrix {  // blocks[num_blocks][stored][32], or of pairs [num_blocks][stored / 2][32]
  const T* blocks;
  int K;  // values of k to sum over
  const float *bias, *scale;
  int stored = PACKED<T> == 4 ? ceil_to(K, 64) : K;  // values of k there are

  ptrdiff_t pitch() const { return (ptrdiff_t)stored * BLOCK / PACKED<T>; }
  // Where entry (k, column) is, counted in single weights.
  ptrdiff_t at(int64_t k, int64_t column) const {
    return column / BLOCK * BLOCK * stored +
           (k / PACKED<T> * BLOCK + column % BLOCK) * PACKED<T> + k % PACKED<T>;
  }
};

template <int ROWS, class X, class T>
static void tiles(const X* x, ptrdiff_t x_stride, const Matrix<T>& w, int from, int to,
                  Output out) {
  // Enough sums to hide their latency; not with bfloat16, whose weights come fastest from one place.
  constexpr int GROUP = std::is_same_v<X, bf16> ? 1 : ROWS == 1 ? 4 : ROWS <= 3 ? 2 : 1;
  const ptrdiff_t pitch = w.pitch();
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

// Rows of K activations, as products with a Matrix<T> take them. What is made for that belongs to the
// thread and the type: there is one at a time.
template <class T>
struct Input {
  const float* x;
  ptrdiff_t stride;
  int rows;
  Input(const float* x, ptrdiff_t stride, int rows, int K) : x(x), stride(stride), rows(rows) {}
};

// The columns of blocks [from, to) of x W for all rows; weights outermost, so read once.
template <class X, class T>
static void multiply_vectors(const X* x, ptrdiff_t stride, int rows, const Matrix<T>& w, int from,
                             int to, const Output& out) {
  const int group = rows == 1 ? to - from : 4;
  for (int b = from; b < to; b += group)
    in_chunks(rows, [&](int first, int count) {
      with_rows(count, [&](auto constant) {
        tiles<constant.value>(x + first * stride, stride, w, b, std::min(b + group, to),
                              out.from(first));
      });
    });
}

template <class T>
static void multiply(const Input<T>& in, const Matrix<T>& w, int from, int to, float* out,
                     ptrdiff_t out_stride, bool add) {
  multiply_vectors(in.x, in.stride, in.rows, w, from, to,
                   {out, out_stride, w.bias, w.scale, add});
}
