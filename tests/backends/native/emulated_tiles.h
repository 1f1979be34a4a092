// Matrix units in software, for processors with AVX-512 and bfloat16 that have none: forced into a
// build of the kernels (-include), it stands for the instructions of AMX and for what Linux says of
// them. As the real ones do, it traps where shapes do not fit or where nothing is configured.
#pragma once
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1
#define syscall(...) 0  // "granted"

namespace emulated {

struct Tile {
  int rows, row_bytes;
  alignas(64) uint8_t at[16][64];

  template <class T>
  T* row(int r) {
    return (T*)at[r];
  }
};
inline thread_local Tile tiles[8];

inline Tile& tile(int t) {
  if (!tiles[t].rows || !tiles[t].row_bytes) __builtin_trap();
  return tiles[t];
}

inline void release() { std::memset(tiles, 0, sizeof tiles); }

inline void configure(const void* shapes) {
  const uint8_t* given = (const uint8_t*)shapes;
  release();
  if (given[0] != 1 || given[1]) __builtin_trap();
  for (int t = 0; t < 8; t++) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, given + 16 + 2 * t, 2);
    if (row_bytes > 64 || given[48 + t] > 16) __builtin_trap();
    tiles[t].row_bytes = row_bytes, tiles[t].rows = given[48 + t];
  }
}

inline void zero(int t) { std::memset(tile(t).at, 0, sizeof tile(t).at); }

inline void load(int t, const void* from, int64_t stride) {
  zero(t);
  for (int r = 0; r < tile(t).rows; r++)
    std::memcpy(tile(t).at[r], (const uint8_t*)from + r * stride, tile(t).row_bytes);
}

inline void store(int t, void* to, int64_t stride) {
  for (int r = 0; r < tile(t).rows; r++)
    std::memcpy((uint8_t*)to + r * stride, tile(t).at[r], tile(t).row_bytes);
}

// sums[m][n] += `product` of four bytes of each, for all k.
template <class Sum, class Product>
inline void multiply(int sums, int left, int right, Product product) {
  Tile &c = tile(sums), &a = tile(left), &b = tile(right);
  if (c.rows != a.rows || c.row_bytes != b.row_bytes || a.row_bytes != 4 * b.rows) __builtin_trap();
  for (int m = 0; m < c.rows; m++)
    for (int k = 0; k < b.rows; k++)
      for (int n = 0; n < c.row_bytes / 4; n++)
        product(c.row<Sum>(m)[n], a.at[m] + 4 * k, b.at[k] + 4 * n);
}

inline float widen(const uint8_t* two) {
  const uint32_t bits = (two[0] | two[1] << 8) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline void multiply_bf16(int sums, int left, int right) {
  multiply<float>(sums, left, right, [](float& sum, const uint8_t* a, const uint8_t* b) {
    sum += widen(a) * widen(b);
    sum += widen(a + 2) * widen(b + 2);
  });
}

inline void multiply_int8(int sums, int left, int right) {
  multiply<int32_t>(sums, left, right, [](int32_t& sum, const uint8_t* a, const uint8_t* b) {
    for (int i = 0; i < 4; i++) sum += (int8_t)a[i] * (int8_t)b[i];
  });
}

}  // namespace emulated

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#define _tile_loadconfig emulated::configure
#define _tile_release emulated::release
#define _tile_zero emulated::zero
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_dpbf16ps emulated::multiply_bf16
#define _tile_dpbssd emulated::multiply_int8
