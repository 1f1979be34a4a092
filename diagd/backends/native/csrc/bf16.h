// Products of bfloat16 with bfloat16, on the matrix units (AMX) or on vectors. A number of the
// result is one sum over k, in order, however many rows there are.
#pragma once
#include "kernels.h"
#if defined(BF16_DOTS) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#define MATRIX_UNITS  // AMX; other systems grant it in other ways, which nobody has tried
#include <sys/syscall.h>
#include <unistd.h>
#else
INLINE bool matrix_units() { return false; }
#endif

INLINE void prefetch_lines(const void* p, int lines) {
  for (int line = 0; line < lines; line++) __builtin_prefetch((const char*)p + line * 64);
}

#if defined(BF16_DOTS)
constexpr int STEP = 32;  // values of k at a time

// Rows of bfloat16: 16 rows of a step begin at `of(row, k)`, `pitch` apart.
struct Rows16 {
  bf16* x;
  ptrdiff_t pitch, step, group;  // from a row, a step of k, 16 rows to the next
  bf16* of(int row, int k) const { return x + row / 16 * group + k / STEP * step; }
  ptrdiff_t row_bytes() const { return pitch * sizeof(bf16); }
};

INLINE void round_to(bf16* to, Floats x) {
  _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)x));
}

#if defined(MATRIX_UNITS)
// Asks Linux for the matrix units of this processor (AMX), once.
inline bool matrix_units() {
  static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  return granted;
}

struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// What more than 16 rows take together: values of k, blocks of columns, groups of 32 rows.
constexpr int PANEL = 128, BLOCKS = 16, GROUPS = 4;

// Fetches so many lines from `p` on into the level-2 cache, and moves on.
INLINE void fetch(const char*& p, int lines) {
  for (int line = 0; line < lines; line++, p += 64) __builtin_prefetch(p, 0, 2);
}

// At most 16 rows of x times blocks b and, if `two`, b + 1. Tiles hold `tile_rows`, of which `rows`
// count.
static void multiply_16(const Rows16& x, int rows, int tile_rows, const Matrix<Pair>& w, int b,
                        bool two, const Output& out) {
  const ptrdiff_t pitch = w.pitch(), row_bytes = BLOCK * sizeof(Pair);
  const Pair* p = w.blocks + b * pitch;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int k = 0; k < w.K; k += STEP, p += STEP / 2 * BLOCK) {
    _tile_loadd(4, x.of(0, k), x.row_bytes());
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
    prefetch_lines(p + STEP * BLOCK, 32);  // of the next step but one
  }
  const ptrdiff_t out_bytes = out.stride * sizeof(float);
  float* to = out.to + b * BLOCK;
  const bool direct = out.plain() && rows == tile_rows;
  float sums[4][16][WIDTH];
  _tile_stored(0, direct ? to : sums[0][0], direct ? out_bytes : 64);
  _tile_stored(1, direct ? to + WIDTH : sums[1][0], direct ? out_bytes : 64);
  if (two) {
    _tile_stored(2, direct ? to + BLOCK : sums[2][0], direct ? out_bytes : 64);
    _tile_stored(3, direct ? to + BLOCK + WIDTH : sums[3][0], direct ? out_bytes : 64);
  }
  if (direct) return;
  for (int row = 0; row < rows; row++)
    for (int t = 0; t < (two ? 4 : 2); t++)
      finish(out, row, b * BLOCK + t * WIDTH, load(sums[t][row]));
}

// What 32 rows have summed up for a block of columns so far.
struct alignas(64) Partial {
  float sums[2 * 16][BLOCK];
};

// Takes values [from, to) of k into the sums of rows `first` on, at most 32, and a block of
// columns; for each step, `lines` more of what comes next are fetched.
template <bool WIDE>  // more than 16 rows
static void add_panel(const Rows16& x, int first, const Pair* p, int from, int to, Partial& partial,
                      const char*& next, int lines) {
  constexpr int ROW = BLOCK * sizeof(float);
  auto& sums = partial.sums;
  if (from) {
    _tile_loadd(0, sums[0], ROW);
    _tile_loadd(1, sums[0] + WIDTH, ROW);
    if (WIDE) _tile_loadd(2, sums[16], ROW);
    if (WIDE) _tile_loadd(3, sums[16] + WIDTH, ROW);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int k = from; k < to; k += STEP) {
    const Pair* w = p + k / 2 * BLOCK;
    _tile_loadd(4, x.of(first, k), x.row_bytes());
    _tile_loadd(5, w, BLOCK * sizeof(Pair));
    _tile_loadd(6, w + WIDTH, BLOCK * sizeof(Pair));
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 6);
    if (WIDE) {
      _tile_loadd(7, x.of(first + 16, k), x.row_bytes());
      _tile_dpbf16ps(2, 7, 5);
      _tile_dpbf16ps(3, 7, 6);
    }
    fetch(next, lines);
  }
  _tile_stored(0, sums[0], ROW);
  _tile_stored(1, sums[0] + WIDTH, ROW);
  if (WIDE) _tile_stored(2, sums[16], ROW);
  if (WIDE) _tile_stored(3, sums[16] + WIDTH, ROW);
}

static Partial* partials(int rows) {
  static thread_local std::vector<Partial> memory;
  make_room(memory, (uint64_t)(rows + 31) / 32 * BLOCKS);
  return memory.data();
}

// More than 16 rows of x times `count` blocks from b on. Some groups of rows stay in the level-1
// cache for a panel of k while all blocks are multiplied; meanwhile the weights of the next block
// are fetched.
static void multiply_many(const Rows16& x, int rows, const Matrix<Pair>& w, int b, int count,
                          const Output& out) {
  const int groups = (rows + 31) / 32;
  Partial* const memory = partials(rows);
  const Pair* p = w.blocks + b * w.pitch();
  for (int k = 0; k < w.K; k += PANEL) {
    const int end = std::min(k + PANEL, w.K);
    for (int first = 0; first < groups; first += GROUPS) {
      const int last = std::min(first + GROUPS, groups), lines = first ? 0 : 32 / (last - first);
      for (int c = 0; c < count; c++) {
        const Pair *here = p + c * w.pitch(), *after = here + w.pitch() + k / 2 * BLOCK;
        if (c + 1 == count) after = p + end / 2 * BLOCK;
        const char* next = (const char*)after;
        for (int g = first; g < last; g++) {
          Partial& partial = memory[g * BLOCKS + c];
          if (rows - 32 * g > 16)
            add_panel<true>(x, 32 * g, here, k, end, partial, next, lines);
          else
            add_panel<false>(x, 32 * g, here, k, end, partial, next, lines);
        }
      }
    }
  }
  for (int row = 0; row < rows; row++)
    for (int c = 0; c < count; c++) {
      const float* sums = memory[row / 32 * BLOCKS + c].sums[row % 32];
      for (int at = 0; at < BLOCK; at += WIDTH)
        finish(out, row, (b + c) * BLOCK + at, load(sums + at));
    }
}

// There has to be memory to fill the last tile of 16 rows unless it is the only one.
static void multiply_units(const Rows16& x, int rows, const Matrix<Pair>& w, int from, int to,
                           const Output& out) {
  TileShapes shapes;
  const int tile_rows = std::min(rows, 16);
  for (int t = 0; t < 8; t++)
    shapes.row_bytes[t] = 64, shapes.rows[t] = t == 5 || t == 6 ? 16 : tile_rows;
  _tile_loadconfig(&shapes);
  if (rows <= 16)
    for (int b = from; b < to; b += 2) multiply_16(x, rows, tile_rows, w, b, b + 1 < to, out);
  else
    for (int b = from; b < to; b += BLOCKS)
      multiply_many(x, rows, w, b, std::min(BLOCKS, to - b), out);
  _tile_release();
}
#else
static void multiply_units(const Rows16&, int, const Matrix<Pair>&, int, int, const Output&) {}
static void partials(int) {}
#endif

static void multiply_rounded(const Rows16& x, int rows, const Matrix<Pair>& w, int from, int to,
                             const Output& out) {
  if (matrix_units())
    multiply_units(x, rows, w, from, to, out);
  else  // the next row is one pitch further in all of x
    multiply_vectors(x.x, x.pitch, rows, w, from, to, out);
}

template <>
struct Input<Pair> {
  int rows;
  Rows16 rounded;  // for the matrix units tile by tile, else row by row

  Input(const float* x, ptrdiff_t stride, int rows, int K, int = 1)
      : rows(rows), rounded(room(rows, K)) {
    for (int row = 0; row < rows; row++)
      for (int k = 0; k < K; k += WIDTH)
        round_to(rounded.of(row, k) + row % 16 * rounded.pitch + k % STEP,
                 load(x + row * stride + k));
  }
  static void reserve(int rows, int K) {
    room(rows, K);
    if (matrix_units() && rows > 16) partials(rows);
  }

 private:
  static Rows16 room(int rows, int K) {
    static thread_local std::vector<bf16> memory;
    const ptrdiff_t row = ceil_to(K, STEP), long_row = row + STEP;  // see `apart` in decoder.cpp
    Rows16 x = matrix_units() ? Rows16{nullptr, STEP, 16 * STEP, 16 * row}
                              : Rows16{nullptr, long_row, STEP, 16 * long_row};
    make_room(memory, (uint64_t)ceil_to(rows, 16) / 16 * x.group);
    x.x = memory.data();
    return x;
  }
};

template <>
void multiply(const Input<Pair>& in, const Matrix<Pair>& w, int from, int to, float* out,
              ptrdiff_t out_stride, bool add) {
  multiply_rounded(in.rounded, in.rows, w, from, to, {out, out_stride, w.bias, w.scale, add});
}
#endif
