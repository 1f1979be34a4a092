// Softmax attention under any mask, and its gradients, in bfloat16: what training by schedules
// consists of. The scores never are in memory as a whole; blocks of 32 queries and 32 keys that
// nobody sees are left out (Dao, arXiv:2307.08691, on other hardware).
#include <atomic>

#include "packing.h"
#include "team.h"

#if defined(BF16_DOTS)
namespace {

constexpr int AT_ONCE = 8;  // blocks that are multiplied together
constexpr float NEVER = -INFINITY;

#if defined(MATRIX_UNITS)
void use_whole_tiles() {
  if (!matrix_units()) return;
  TileShapes shapes;
  for (int t = 0; t < 8; t++) shapes.row_bytes[t] = 64, shapes.rows[t] = 16;
  _tile_loadconfig(&shapes);
}

void leave_tiles() {
  if (matrix_units()) _tile_release();
}

template <class Columns>
INLINE void multiply_tiles(const bf16* a, ptrdiff_t a_pitch, const Columns& b, ptrdiff_t b_pitch,
                           ptrdiff_t b_right, int steps, float* to, ptrdiff_t pitch, bool add) {
  const ptrdiff_t row = pitch * sizeof(float), a_row = a_pitch * sizeof(bf16);
  if (add) {
    _tile_loadd(0, to, row);
    _tile_loadd(1, to + 16, row);
    _tile_loadd(2, to + 16 * pitch, row);
    _tile_loadd(3, to + 16 * pitch + 16, row);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int s = 0; s < steps; s++) {
    _tile_loadd(4, a + s * 32, a_row);
    _tile_loadd(5, b(s), b_pitch);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, b(s) + b_right, b_pitch);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(7, a + 16 * a_pitch + s * 32, a_row);
    _tile_dpbf16ps(2, 7, 5);
    _tile_dpbf16ps(3, 7, 6);
  }
  _tile_stored(0, to, row);
  _tile_stored(1, to + 16, row);
  _tile_stored(2, to + 16 * pitch, row);
  _tile_stored(3, to + 16 * pitch + 16, row);
}
#else
void use_whole_tiles() {}
void leave_tiles() {}
template <class... Arguments>
INLINE void multiply_tiles(const Arguments&...) {}
#endif

template <class Columns>
INLINE void multiply_vectors(const bf16* a, ptrdiff_t a_pitch, const Columns& b, ptrdiff_t b_pitch,
                             ptrdiff_t b_right, int steps, float* to, ptrdiff_t pitch, bool add) {
  constexpr int ROWS = 8;
  for (int row = 0; row < SIDE; row += ROWS, a += ROWS * a_pitch, to += ROWS * pitch) {
    Floats sums[ROWS][2] = {};
    if (add)
      for (int r = 0; r < ROWS; r++)
        for (int side = 0; side < 2; side++) sums[r][side] = load(to + r * pitch + 16 * side);
    for (int s = 0; s < steps; s++) {
      const bf16* columns = b(s);
      for (int k = 0; k < 32; k += 2, columns += b_pitch / sizeof(bf16)) {
        const Ints left = *(const Ints*)columns;
        const Ints right = *(const Ints*)(columns + b_right);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
          const bf16* pair = a + r * a_pitch + s * 32 + k;
          add_product(sums[r][0], pair, spread(pair), left);
          add_product(sums[r][1], pair, spread(pair), right);
        }
      }
    }
    for (int r = 0; r < ROWS; r++)
      for (int side = 0; side < 2; side++) store(to + r * pitch + 16 * side, sums[r][side]);
  }
}

// 32 x 32 numbers, `pitch` apart, (added to) the sum over `steps` times 32 of a's 32 rows,
// `a_pitch` apart, and the columns of b(step): 16 pairs of rows, `b_pitch` bytes apart, and 16 more
// columns `b_right` away.
template <class Columns>
INLINE void multiply_block(const bf16* a, ptrdiff_t a_pitch, const Columns& b, ptrdiff_t b_pitch,
                           ptrdiff_t b_right, int steps, float* to, ptrdiff_t pitch, bool add) {
  if (matrix_units())
    multiply_tiles(a, a_pitch, b, b_pitch, b_right, steps, to, pitch, add);
  else
    multiply_vectors(a, a_pitch, b, b_pitch, b_right, steps, to, pitch, add);
}

// The products of 32 rows with 32 turned ones.
INLINE void multiply_rows(const bf16* rows, const bf16* turned, int size, float* to,
                          ptrdiff_t pitch) {
  multiply_block(
      rows, size, [&](int s) { return turned + 512 * s; }, 64, 16 * size, size / 32, to, pitch,
      false);
}

// Which of 16 lanes at `seen` are 1, of those before `left`.
INLINE __mmask16 which(const uint8_t* seen, int left) {
  const __mmask16 there = left >= 16 ? 0xffff : left <= 0 ? 0 : (1 << left) - 1;
  const __m128i bytes = _mm_maskz_loadu_epi8(there, seen);
  return _mm_test_epi8_mask(bytes, bytes);
}

INLINE Floats where(__mmask16 mask, Floats yes, float no) {
  return (Floats)_mm512_mask_mov_ps(_mm512_set1_ps(no), mask, (__m512)yes);
}

// 2^x as good as bfloat16 takes it; 0 where x is below -120.
INLINE Floats quick_exp2(Floats x) {
  const __mmask16 counts = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-120), _CMP_NLT_UQ);
  const __m512 n = _mm512_roundscale_ps((__m512)x, 8);
  const Floats r = x - (Floats)n;
  Floats p = splat(5.5171669e-2f);
  p = p * r + 2.4261149e-1f;
  p = p * r + 6.9326098e-1f;
  p = p * r + 9.9992520e-1f;
  return (Floats)_mm512_maskz_scalef_ps(counts, (__m512)p, n);
}

INLINE float sum_of(Floats x) { return _mm512_reduce_add_ps((__m512)x); }
INLINE float max_of(Floats x) { return _mm512_reduce_max_ps((__m512)x); }

struct Forward {
  Packed queries, keys, values;
  Sums sums;
  alignas(64) float scores[SIDE][AT_ONCE * SIDE];
  float peaks[SIDE], masses[SIDE];

  void read(const Attended& a, int batch, int kv_head) {
    pack_turned({a.keys, a, a.kv_heads, batch, kv_head}, keys);
    pack_pairs({a.values, a, a.kv_heads, batch, kv_head}, values);
  }

  void run(const Attended& a, int batch, int head) {
    const Rows rows(a.queries, a, a.heads, batch, head);
    pack_rows(rows, queries);
    const int count = rows.padded() / SIDE;
    for (int q = 0; q < count; q++) {
      sums.clear(SIDE * a.head_dim);
      std::fill(peaks, peaks + SIDE, -1e30f);
      std::fill(masses, masses + SIDE, 0.0f);
      int some[AT_ONCE], filled = 0;
      for (int k = 0; k < count; k++) {
        if (a.blocks[q * count + k]) some[filled++] = k;
        if (filled == AT_ONCE || (k + 1 == count && filled)) {
          accumulate(a, q, some, filled);
          filled = 0;
        }
      }
      const int here = std::min(SIDE, a.lanes - q * SIDE);
      for (int r = 0; r < here; r++) {
        const int lane = q * SIDE + r;
        bf16* to = a.to + place(a, a.heads, batch, lane, head);
        const float inverse = masses[r] == 0 ? 0 : 1 / masses[r];
        for (int d = 0; d < a.head_dim; d += WIDTH)
          round_to(to + d, load(&sums[r * a.head_dim + d]) * inverse);
        masses_of(a, batch, head)[lane] =
            masses[r] == 0 ? INFINITY : peaks[r] * a.scale * LOG2_E + std::log2(masses[r]);
      }
    }
  }

  void write(const Attended&, int, int) const {}  // run() has written all

  void accumulate(const Attended& a, int q, const int* some, int filled) {
    const int size = a.head_dim, count = ceil_to(a.lanes, SIDE) / SIDE;
    constexpr ptrdiff_t ROW = AT_ONCE * SIDE;
    for (int j = 0; j < filled; j++)
      multiply_rows(&queries[(size_t)q * SIDE * size], &keys[(size_t)some[j] * SIDE * size], size,
                    scores[0] + j * SIDE, ROW);
    const int here = std::min(SIDE, a.lanes - q * SIDE);
    const float scale = a.scale * LOG2_E;
    float fades[SIDE];
    for (int r = 0; r < SIDE; r++) {
      Floats highest = splat(peaks[r]);
      for (int j = 0; j < filled; j++)
        for (int c = 0; c < SIDE; c += 16) {
          float* at = scores[r] + j * SIDE + c;
          if (a.blocks[q * count + some[j]] == 1) {
            const int key = some[j] * SIDE + c, left = r < here ? a.lanes - key : 0;
            const uint8_t* seen = a.visible + (ptrdiff_t)(q * SIDE + r) * a.lanes + key;
            store(at, where(which(seen, left), load(at), NEVER));
          }
          highest = load(at) > highest ? load(at) : highest;
        }
      const float peak = max_of(highest);
      fades[r] = (peaks[r] - peak) * scale;
      peaks[r] = peak;
    }
    for (int r = 0; r < SIDE; r += 16) store(fades + r, exp2(load(fades + r)));
    for (int r = 0; r < SIDE; r++) {
      bf16* weights = (bf16*)scores[r];  // over what was read
      const Floats peak = splat(peaks[r] * scale);
      Floats total = {};
      for (int c = 0; c < filled * SIDE; c += 16) {
        const Floats weight = quick_exp2(load(scores[r] + c) * scale - peak);
        total += weight;
        round_to(weights + c, weight);
      }
      masses[r] = masses[r] * fades[r] + sum_of(total);
      if (fades[r] != 1)
        for (int d = r * size; d < (r + 1) * size; d += WIDTH)
          store(&sums[d], load(&sums[d]) * fades[r]);
    }
    for (int d = 0; d < size; d += SIDE)
      multiply_block((bf16*)scores[0], 2 * ROW,
                     [&](int j) { return &values[(size_t)some[j] * SIDE * size + 2 * d]; },
                     4 * size, 32, filled, &sums[d], size, true);
  }
};

struct Backward {
  Packed keys, values, key_columns;                // rows, rows, columns
  Packed queries, grads, query_pairs, grad_pairs;  // turned, turned, pairs, pairs
  Sums query_sums, key_sums, value_sums, dots;
  alignas(64) float scores[SIDE][SIDE], slopes[SIDE][SIDE];
  alignas(64) bf16 weights[SIDE][AT_ONCE * SIDE], changes[SIDE][AT_ONCE * SIDE];
  alignas(64) bf16 paired[SIDE / 2][SIDE][2];

  void read(const Attended& a, int batch, int kv_head) {
    pack_rows({a.keys, a, a.kv_heads, batch, kv_head}, keys);
    pack_columns({a.keys, a, a.kv_heads, batch, kv_head}, key_columns);
    pack_rows({a.values, a, a.kv_heads, batch, kv_head}, values);
    const size_t count = (size_t)ceil_to(a.lanes, SIDE) * a.head_dim;
    key_sums.clear(count);
    value_sums.clear(count);
  }

  void run(const Attended& a, int batch, int head) {
    const int size = a.head_dim, padded = ceil_to(a.lanes, SIDE), count = padded / SIDE;
    const Rows rows(a.queries, a, a.heads, batch, head), outs(a.out, a, a.heads, batch, head),
        out_grads(a.out_grad, a, a.heads, batch, head);
    pack_turned(rows, queries);
    pack_pairs(rows, query_pairs);
    pack_turned(out_grads, grads);
    pack_pairs(out_grads, grad_pairs);
    query_sums.clear(rows.count());
    dots.clear(2 * padded);  // of outputs and their gradients; the softmax's masses
    float* masses = &dots[padded];
    std::fill(masses, masses + padded, INFINITY);
    for (int i = 0; i < a.lanes; i++) {
      Floats total = {};
      for (int d = 0; d < size; d += WIDTH)
        total += load(outs.row(i) + d) * load(out_grads.row(i) + d);
      dots[i] = sum_of(total);
      masses[i] = masses_of(a, batch, head)[i];
    }
    for (int k = 0; k < count; k++) {
      int some[AT_ONCE], filled = 0;
      for (int q = 0; q < count; q++) {
        if (const int seen = a.blocks[q * count + k]) {
          weigh(a, q, k, seen == 1, masses, filled * SIDE);
          some[filled++] = q;
        }
        if (filled == AT_ONCE || (q + 1 == count && filled)) {
          accumulate(k, some, filled, size);
          filled = 0;
        }
      }
    }
    const __m512i rows_apart = apart(SIDE);
    for (int i = 0; i < a.lanes; i++) {
      bf16* to = a.queries_grad + place(a, a.heads, batch, i, head);
      for (int d = 0; d < size; d += WIDTH) {
        const float* from = &query_sums[((size_t)(i / SIDE) * size + d) * SIDE + i % SIDE];
        round_to(to + d, (Floats)_mm512_i32gather_ps(rows_apart, from, 4) * a.scale);
      }
    }
  }

  void weigh(const Attended& a, int q, int k, bool masked, const float* masses, int to) {
    const int size = a.head_dim;
    const size_t at_keys = (size_t)k * SIDE * size, at_queries = (size_t)q * SIDE * size;
    multiply_rows(&keys[at_keys], &queries[at_queries], size, scores[0], SIDE);
    multiply_rows(&values[at_keys], &grads[at_queries], size, slopes[0], SIDE);
    const float scale = a.scale * LOG2_E;
    for (int c = 0; c < SIDE; c += 16) {
      const Floats mass = load(masses + q * SIDE + c), dot = load(&dots[q * SIDE + c]);
      for (int r = 0; r < SIDE; r += 2) {
        Floats change[2];
        for (int i = 0; i < 2; i++) {
          Floats weight = quick_exp2(load(scores[r + i] + c) * scale - mass);
          if (masked) {
            const int key = k * SIDE + r + i, query = q * SIDE + c;
            const __mmask16 seen =
                key < a.lanes ? which(a.seen_by + (ptrdiff_t)key * a.lanes + query, a.lanes - query)
                              : 0;
            weight = where(seen, weight, 0);
          }
          change[i] = weight * (load(slopes[r + i] + c) - dot);
          round_to(weights[r + i] + to + c, weight);
          round_to(changes[r + i] + to + c, change[i]);
        }
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)change[1], (__m512)change[0]);
        const __m512i order =
            _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                             22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        _mm512_store_si512(paired[r / 2][c], _mm512_permutexvar_epi16(order, both));
      }
    }
    const ptrdiff_t padded = ceil_to(a.lanes, SIDE);
    for (int d = 0; d < size; d += SIDE)
      multiply_block(
          &key_columns[d * padded + k * SIDE], padded, [&](int) { return paired[0][0]; }, 128, 32,
          1, &query_sums[at_queries + (size_t)d * SIDE], SIDE, true);
  }

  void accumulate(int k, const int* some, int filled, int size) {
    const size_t at_keys = (size_t)k * SIDE * size;
    for (int d = 0; d < size; d += SIDE) {
      const auto pairs = [&](const Packed& of) {
        return [&, d](int j) { return &of[(size_t)some[j] * SIDE * size + 2 * d]; };
      };
      multiply_block(weights[0], AT_ONCE * SIDE, pairs(grad_pairs), 4 * size, 32, filled,
                     &value_sums[at_keys + d], size, true);
      multiply_block(changes[0], AT_ONCE * SIDE, pairs(query_pairs), 4 * size, 32, filled,
                     &key_sums[at_keys + d], size, true);
    }
  }

  void write(const Attended& a, int batch, int kv_head) const {
    for (int i = 0; i < a.lanes; i++) {
      const ptrdiff_t at = place(a, a.kv_heads, batch, i, kv_head);
      const ptrdiff_t from = (ptrdiff_t)i * a.head_dim;
      for (int d = 0; d < a.head_dim; d += WIDTH) {
        round_to(a.keys_grad + at + d, load(&key_sums[from + d]) * a.scale);
        round_to(a.values_grad + at + d, load(&value_sums[from + d]));
      }
    }
  }
};

// Passes over all heads, those that share a head of keys one after the other.
template <class Pass>
int pass_over(const Attended& a) {
  const int64_t all = (int64_t)a.batch * a.kv_heads;
  std::atomic<int64_t> next{0};
  std::atomic<int> failed{0};
  const auto pass_some = [&] {
    static thread_local Pass pass;
    const int group = a.heads / a.kv_heads;
    use_whole_tiles();
    for (int64_t i; (i = next++) < all;) {
      const int batch = i / a.kv_heads, kv_head = i % a.kv_heads;
      pass.read(a, batch, kv_head);
      for (int j = 0; j < group; j++) pass.run(a, batch, kv_head * group + j);
      pass.write(a, batch, kv_head);
    }
    leave_tiles();
    return 0;
  };
  team.run(a.threads, [&](int, int, Barrier&) {
    if (guarded(pass_some)) failed = 2;
  });
  return failed;
}

}  // namespace
#endif

extern "C" {
// Whether there are kernels for it here.
int attention_trains() {
#if defined(BF16_DOTS)
  return 1;
#else
  return 0;
#endif
}

#if defined(BF16_DOTS)
// Writes `to` and `masses`; returns 2 where there is not enough memory, like the next one.
int attend_forward(const Attended* a) {
  return guarded([&] { return pass_over<Forward>(*a); });
}
// Writes the three gradients.
int attend_backward(const Attended* a) {
  return guarded([&] { return pass_over<Backward>(*a); });
}
#endif
}
