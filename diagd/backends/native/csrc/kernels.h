// Products of a few rows with a large matrix: what a decoding step consists of.
//
// A matrix is stored in blocks of columns, `block[k][column]`. A product is made of tiles, of some
// rows and columns, whose sums stay in registers while k goes by. Every output is summed over k in
// ascending order, whatever tile it falls into: results do not depend on how many lanes share a
// step, and raster and diagonal steps that see the same tokens compute the same bits.
#pragma once
#include <cstdint>
#include <vector>

#include "simd.h"

// Columns of a block, which are those of a tile of many rows; values of k.
constexpr int BLOCK = REGISTER == 64 ? 32 : 16, PREFETCH = 64;

// Makes room for `count` numbers at least, or throws; counts are of 64 bits in a browser, too.
template <class T>
void make_room(std::vector<T>& numbers, uint64_t count) {
  if (numbers.size() < count) numbers.resize(std::min<uint64_t>(count, SIZE_MAX));
}

// Returns what f returns, 2 where it throws: for lack of memory or threads.
template <class F>
int guarded(F f) {
#if defined(__cpp_exceptions)
  try {
    return f();
  } catch (...) {
    return 2;
  }
#else  // in a browser it traps
  return f();
#endif
}

// Where a product goes: out = (or +=) row * scale * x W + bias. Pointers but `to` may be null.
struct Output {
  float* to;
  ptrdiff_t stride;
  const float *bias = nullptr, *scale = nullptr;
  bool add = false;
  const float* row_scale = nullptr;  // of sums of whole numbers
  int digits = 1;                    // rows of x to a row of these: sums of each digit

  bool plain() const { return !bias && !scale && !add && !row_scale; }
  Output from(int row_of_x) const {
    const int row = row_of_x / digits;
    const float* scales = row_scale ? row_scale + row : nullptr;
    return {to + row * stride, stride, bias, scale, add, scales, digits};
  }
};
constexpr int DIGIT = 126;  // what a step of the first digit is worth in steps of the second

INLINE void finish(const Output& out, int row, int column, Floats value) {
  float* to = out.to + row * out.stride + column;
  if (out.scale) value *= load(out.scale + column);
  if (out.bias) value += load(out.bias + column);
  store(to, out.add ? load(to) + value : value);
}
INLINE void finish(const Output& out, int row, int column, Ints sums) {
  finish(out, row, column, to_floats(sums) * out.row_scale[row]);
}
INLINE void finish(const Output& out, int row, int column, Ints first, Ints second) {
  const Floats both = to_floats(first) + to_floats(second) * (1.0f / DIGIT);
  finish(out, row, column, both * out.row_scale[row]);
}

template <class T>  // weights in a T
constexpr int PACKED = std::is_same_v<T, float>  ? 1
                       : std::is_same_v<T, Quad> ? 4
                                                 : 2;
template <class T>  // products of whole numbers
constexpr bool WHOLE = std::is_same_v<T, Quad> || std::is_same_v<T, Duo>;
// What sums over k begin with: 0, or where T is Quad a row of whole numbers before a block's
// weights.
template <class T>
constexpr int FIRST_ROWS = std::is_same_v<T, Quad> ? 1 : 0;

template <class T>
struct Matrix {  // blocks[num_blocks][FIRST_ROWS + stored / PACKED][BLOCK]
  const T* blocks;
  int K;  // values of k to sum over
  const float *bias = nullptr, *scale = nullptr;
  int stored = PACKED<T> == 4 ? ceil_to(K, 64) : K;  // values of k there are

  ptrdiff_t pitch() const { return (ptrdiff_t)(FIRST_ROWS<T> + stored / PACKED<T>)*BLOCK; }
  const T* column(int column) const { return blocks + column / BLOCK * pitch() + column % BLOCK; }
  // Where entry (k, column) is, counted in single weights, without a first row.
  ptrdiff_t at(int64_t k, int64_t column) const {
    return column / BLOCK * BLOCK * stored + (k / PACKED<T> * BLOCK + column % BLOCK) * PACKED<T> +
           k % PACKED<T>;
  }
};

// The products of a tile: an activation (or two, or four) for every column, and weight `j` of the
// columns, of those that stand together.
INLINE Floats spread(const float* x) { return splat(*x); }
template <class Whole>
INLINE Ints spread(const Whole* x) {
  int32_t all;
  std::memcpy(&all, x, sizeof(all));
  return splat(all);
}
INLINE Floats unpack(const float* p, int) { return load(p); }
INLINE Floats unpack(const Pair* p, int j) {
  const Ints pairs = *(const Ints*)p;
  return (Floats)(j ? pairs & (int32_t)0xffff0000 : pairs << 16);
}
INLINE void add_product(Floats& sums, const float*, Floats x, Floats w) { sums = fma(x, w, sums); }
INLINE void add_product(Ints& sums, const int8_t*, Ints x, Ints w) { sums = dot_quads(sums, x, w); }
INLINE void add_product(Ints& sums, const int16_t*, Ints x, Ints w) { sums = dot_duos(sums, x, w); }
#if defined(BF16_DOTS)
INLINE void add_product(Floats& sums, const bf16*, Ints x, Ints w) {
  sums = (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)x, (__m512bh)w);
}
#endif

// Rows of the largest tile; its sums leave registers for weights and an activation.
constexpr int MAX_ROWS = REGISTER == 64 ? 14 : 6;

// What is read next: a loop that computes fetches a bit of it into the level-2 cache in each turn,
// so that memory does not wait for arithmetic.
struct Ahead {
  const char* p;
  ptrdiff_t step;  // bytes a turn

  INLINE void fetch() {
    __builtin_prefetch(p, 0, 2);
    p += step;
  }
};

// ROWS x (WIDTH * VECTORS) outputs.
template <int ROWS, int VECTORS, class X, class T>
static void tile(const X* x, ptrdiff_t x_stride, const Matrix<T>& w, int column, const Output& out,
                 Ahead& ahead) {
  typedef typename Vector<WHOLE<T>>::of Sums;
  typedef typename Vector<!std::is_same_v<X, float>>::of Factors;
  constexpr int TURNS = std::is_same_v<X, float> ? PACKED<T> : 1;
  const T* p = w.column(column);
  const ptrdiff_t pitch = w.pitch();
  const auto place = [&](int v) { return v * WIDTH / BLOCK * pitch + v * WIDTH % BLOCK; };
  Sums sums[ROWS][VECTORS] = {};
  if constexpr (FIRST_ROWS<T>) {
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) sums[0][v] = *(const Ints*)(p + place(v));
#pragma GCC unroll 16
    for (int row = 1; row < ROWS; row++)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) sums[row][v] = sums[0][v];
    p += BLOCK;
  }
  const int K = PACKED<T> == 4 ? w.stored : w.K;
  Ahead next{ahead.p, ahead.step * VECTORS * WIDTH / BLOCK};  // in registers
  for (int k = 0; k < K; k += PACKED<T>, p += BLOCK) {
    if constexpr (ROWS >= MAX_ROWS / 2)
      next.fetch();  // else it is the only tile that reads the block
#pragma GCC unroll 4
    for (int j = 0; j < TURNS; j++) {
      Factors weights[VECTORS];
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) {
        const T* here = p + place(v);
        if (!j && v * WIDTH % LINE == 0) __builtin_prefetch(here + PREFETCH * BLOCK);
        if constexpr (TURNS == PACKED<T>)
          weights[v] = unpack(here, j);
        else
          weights[v] = *(const Ints*)here;
      }
#pragma GCC unroll 16
      for (int row = 0; row < ROWS; row++) {
        const Factors value = spread(x + row * x_stride + k + j);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) add_product(sums[row][v], x, value, weights[v]);
      }
    }
  }
  ahead.p = next.p;
  if constexpr (FIRST_ROWS<T> && ROWS % 2 == 0)
    if (out.digits == 2) {
#pragma GCC unroll 16
      for (int row = 0; row < ROWS; row += 2)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++)
          finish(out, row / 2, column + v * WIDTH, sums[row][v], sums[row + 1][v]);
      return;
    }
#pragma GCC unroll 16
  for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) finish(out, row, column + v * WIDTH, sums[row][v]);
}

// Vectors of a tile of so many rows: enough sums to hide the latency of a product. Narrow weights
// come fastest from one block.
template <int ROWS, class X>
constexpr int VECTORS = std::min(ROWS == 1   ? 8
                                 : ROWS <= 3 ? 4
                                             : (REGISTERS / MAX_ROWS >= 5 ? 4 : 2),
                                 std::is_same_v<X, float> ? 8 : BLOCK / WIDTH);

template <int ROWS, class X, class T>
static void tiles(const X* x, ptrdiff_t x_stride, const Matrix<T>& w, int column, int end,
                  const Output& out, Ahead& ahead) {
  constexpr int MANY = VECTORS<ROWS, X>, FEW = std::min(MANY, BLOCK / WIDTH);
  for (; column + MANY * WIDTH <= end; column += MANY * WIDTH)
    tile<ROWS, MANY>(x, x_stride, w, column, out, ahead);
  for (; column < end; column += FEW * WIDTH) tile<ROWS, FEW>(x, x_stride, w, column, out, ahead);
}

// Calls f with the number of rows as a compile-time constant.
template <int ROWS = MAX_ROWS, class F>
INLINE void with_rows(int rows, F f) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS) return f(std::integral_constant<int, ROWS>());
    with_rows<ROWS - 1>(rows, f);
  }
}

INLINE int chunks_of(int rows) { return (rows + MAX_ROWS - 1) / MAX_ROWS; }
// Calls f(first row, rows) on chunks of at most MAX_ROWS rows, as even as they come; the digits of
// a row stay together.
template <class F>
INLINE void in_chunks(int rows, int digits, F f) {
  const int chunks = chunks_of(rows);
  const auto begin = [&](int c) { return (int)((int64_t)rows / digits * c / chunks) * digits; };
  for (int c = 0; c < chunks; c++) f(begin(c), begin(c + 1) - begin(c));
}

// The columns of blocks [from, to) of x W for all rows; columns outermost, so weights are read
// once. Of several chunks of rows only the first one reads from memory, so each fetches a share of
// the next block.
template <class X, class T>
static void multiply_vectors(const X* x, ptrdiff_t stride, int rows, const Matrix<T>& w, int from,
                             int to, const Output& out) {
  for (int b = from, end; b < to; b = end) {
    end = rows <= MAX_ROWS ? to : b + 1;
    Ahead ahead{(const char*)x, 0};
    if (end < to)
      ahead = {(const char*)w.column(end * BLOCK), (int)sizeof(T) * BLOCK / chunks_of(rows)};
    in_chunks(rows, out.digits, [&](int first, int count) {
      with_rows(count, [&](auto constant) {
        tiles<constant.value>(x + first * stride, stride, w, b * BLOCK, end * BLOCK,
                              out.from(first), ahead);
      });
    });
  }
}

// Rows of K activations, as products with a Matrix<T> take them. What is made for that belongs to
// the thread and the type: there is one at a time.
template <class T>
struct Input {
  const float* x;
  ptrdiff_t stride;
  int rows;
  Input(const float* x, ptrdiff_t stride, int rows, int, int = 1)
      : x(x), stride(stride), rows(rows) {}
  // Makes room for rows of K numbers, or throws: in the middle of a step nobody could say so.
  static void reserve(int, int) {}
};

template <class T>
static void multiply(const Input<T>& in, const Matrix<T>& w, int from, int to, float* out,
                     ptrdiff_t out_stride, bool add) {
  multiply_vectors(in.x, in.stride, in.rows, w, from, to, {out, out_stride, w.bias, w.scale, add});
}
