// One decoding step of a diagd Transformer as one call: all layers, one team of threads.
//
// Speaks of slots and masks only, like diagd/models/transformer.py, whose numbers it reproduces.
// Activations are float32 throughout; weights and cache are float32, bfloat16 or (weights) int8.

#include <utility>
#include <vector>

#include "attention.h"
#include "lap.h"
#include "records.h"

extern "C" {
int block_columns() { return BLOCK; }

// Cosines and sines by which coordinates turn the pairs of a head (models/rotary.py): a position,
// or frame, row and column.
void turn_of(const Model* model, const int64_t* coordinates, float* to) {
  const Model& m = *model;
  const int half = m.head_dim / 2;
  for (int i = 0; i < half; i++) {
    const int64_t coordinate = coordinates[m.axes[i]], within = coordinate % m.max_positions;
    const float angle_within = (float)within * (float)m.frequencies[i];
    const double angle = (coordinate - within) * m.frequencies[i] + angle_within;
    to[i] = std::cos(angle), to[half + i] = std::sin(angle);
  }
  // where no pair turns by the frame, what stands in no row has keys and queries of zero
  if (m.axes[0] && coordinates[1] < 0) std::fill(to, to + m.head_dim, 0.0f);
}
}

namespace {

// A lane that is no padding: where it stands among (S', L), and its sequence.
struct Row {
  int lane, sequence;
};

void norm(const Model& m, const float* x, float* out, int n, const float* weight, const float* bias,
          bool rms) {
  Parts sums, squares;
  int i = 0;
  for (; i + LINE <= n; i += LINE)
    for (int part = 0; part < LINE / WIDTH; part++) {
      const Floats some = load(x + i + part * WIDTH);
      sums.at[part] += some;
      squares.at[part] += some * some;
    }
  float total = sums.sum(), total2 = squares.sum();
  for (; i < n; i++) total += x[i], total2 += x[i] * x[i];
  float mean = 0, variance = total2 / n;
  if (!rms) {
    mean = total / n;
    variance = 0;
    for (int j = 0; j < n; j++) variance += (x[j] - mean) * (x[j] - mean);
    variance /= n;
  }
  const float scale = 1 / std::sqrt(variance + m.norm_eps);
  for (int j = 0; j < n; j++)
    out[j] = (x[j] - mean) * scale * (weight ? weight[j] : 1) + (bias ? bias[j] : 0);
}

void rotate(float* x, const float* cosines, const float* sines, int half) {
  for (int i = 0; i < half; i++) {
    const float first = x[i], second = x[i + half];
    x[i] = first * cosines[i] - second * sines[i];
    x[i + half] = second * cosines[i] + first * sines[i];
  }
}

// Floats from one row of activations to the next: rows a power of two apart would fall into one set
// of the level-1 cache and evict each other.
int apart(int columns) { return ceil_to(columns, BLOCK) + LINE; }

// W is the type of the weights.
template <class W>
struct Decoder {
  using Embedding = std::conditional_t<PACKED<W> == 1, float, bf16>;
  using Cached = std::conditional_t<PACKED<W> == 4, Duo, W>;
  using Attending = Attention<Cached>;
  const Model& m;
  const Step& s;
  const Row* const fed;       // (rows,) the lanes that are no padding, sequence by sequence
  const int* const starts;    // (sequences + 1) where each sequence begins among them
  const int* const by_mlp;    // (rows,) rows, those of tokens without an output row first
  const int num_plain;        // how many these are
  const int rows = starts[s.sequences], head = ceil_to(m.head_dim, BLOCK);
  const int hidden = ceil_to(m.hidden_size, BLOCK), inner = ceil_to(m.intermediate_size, BLOCK);
  const int digits = m.two_digits ? 2 : 1;  // of activations
  const int group = m.num_heads / m.num_kv_heads;  // heads of queries for a head of the cache
  const int q_width = m.num_heads * m.head_dim, kv_width = m.num_kv_heads * m.head_dim;
  const int qkv = ceil_to(q_width + 2 * kv_width, BLOCK), attended = ceil_to(q_width, BLOCK);
  const int x_stride = apart(hidden), mixed_stride = apart(attended);
  const int qkv_stride = std::max(apart(qkv), x_stride);  // what post-norms read stands there, too
  const int last = ceil_to(m.head_size, BLOCK);  // of the layer before the output layer
  const int middle_stride = apart(std::max(inner * (m.gated ? 2 : 1), last));
  const int slots = ceil_to(s.num_slots, BLOCK), seen = ceil_to(s.visible_slots, BLOCK);
  const int parts = (seen + Attending::PART - 1) / Attending::PART;
  float *x, *projected, *mixed, *middle, *turns;  // turns: cosines, sines of a row
  float* hidden_slots;  // (1 or 2, rows, seen): of layers that see everything, of those that slide
  Span* spans;  // (1 or 2, rows, parts)

  Matrix<W> matrix(const void* blocks, int K, const float* bias, const float* scale) const {
    return {(const W*)blocks, K, bias, scale};
  }

  // What a thread needs beside `memory`.
  int reserve() const {
    Input<W>::reserve(rows * digits, std::max({hidden, attended, inner, last}));
    Input<Cached>::reserve(Attending::AT_ONCE, head);
    return 0;
  }

  // This thread's share of the columns of x W, for rows from `first` on.
  void multiply_share(int thread, int threads, const float* in, int stride, const Matrix<W>& w,
                      int columns, float* out, int out_stride, bool add, int first,
                      int count) const {
    const int64_t blocks = ceil_to(columns, BLOCK) / BLOCK;
    const Input<W> some(in + (ptrdiff_t)first * stride, stride, count, w.K, digits);
    multiply(some, w, blocks * thread / threads, blocks * (thread + 1) / threads,
             out + (ptrdiff_t)first * out_stride, out_stride, add);
  }

  // 0 where a row sees a slot, else minus infinity (decoding/visibility.py).
  void hide(int row) const {
    const auto [lane, sequence] = fed[row];
    float* to = hidden_slots + (ptrdiff_t)row * seen;
    std::fill(to + s.visible_slots, to + seen, -INFINITY);
    const int64_t at = s.at[lane], *held = s.held + sequence * s.held_stride;
    if (s.visible) {
      const uint8_t* visible = s.visible + (ptrdiff_t)lane * s.visible_slots;
      for (int j = 0; j < s.visible_slots; j++) to[j] = visible[j] ? 0 : -INFINITY;
    } else {
      const int64_t step = s.steps[lane], *fed_at = s.fed_at + sequence * s.held_stride;
      for (int j = 0; j < s.visible_slots; j++) {
        const bool sees = (held[j] == at) | ((held[j] < at) & (fed_at[j] <= step));
        to[j] = sees ? 0 : -INFINITY;
      }
    }
    find_spans(row, to);
    if (!m.sliding_window) return;
    float* near = to + (ptrdiff_t)rows * seen;
    std::fill(near + s.visible_slots, near + seen, -INFINITY);
    for (int j = 0; j < s.visible_slots; j++)
      near[j] = at - held[j] < m.sliding_window ? to[j] : -INFINITY;
    find_spans(rows + row, near);
  }

  void find_spans(int row, const float* hidden) const {
    for (int part = 0; part < parts; part++) {
      const int from = part * Attending::PART;
      spans[(ptrdiff_t)row * parts + part] =
          Span::of(hidden + from, std::min(seen - from, (int)Attending::PART));
    }
  }

  void embed(int row) const {
    float* to = x + (ptrdiff_t)row * x_stride;
    const Embedding* from = (const Embedding*)m.embeddings + s.tokens[fed[row].lane] * hidden;
    for (int i = 0; i < hidden; i += WIDTH) store(to + i, load(from + i));
    if (m.positions)
      for (int i = 0; i < m.hidden_size; i++)
        to[i] += m.positions[s.at[fed[row].lane] * m.hidden_size + i];
  }

  // Rotates one head's keys and the queries that share it, and writes keys and values to the cache.
  void write_cache(int kv, int layer) const {
    const Layer& w = m.weights[layer];
    const int half = m.head_dim / 2;
    for (int row = 0; row < rows; row++) {
      const int64_t slot = s.slots[fed[row].lane];
      const float* turn_by = turns + (ptrdiff_t)row * m.head_dim;
      float* q = projected + (ptrdiff_t)row * qkv_stride;
      float* key = q + q_width + kv * m.head_dim;
      const auto turn = [&](float* states, const float* weight, const float* bias, int of) {
        const int own = bias ? of * m.head_dim : 0;
        if (weight)
          norm(m, states, states, m.head_dim, weight + own, bias ? bias + own : nullptr, !bias);
        if (m.frequencies) rotate(states, turn_by, turn_by + half, half);
      };
      for (int h = kv * group; h < (kv + 1) * group; h++)
        turn(q + h * m.head_dim, w.q_norm, w.q_norm_bias, h);
      turn(key, w.k_norm, w.k_norm_bias, kv);
      const Head of = cached(layer, fed[row].sequence, kv);
      put_into(of.keys, key, of.keys.scale + slot, HIGHEST_KEY,
               [&](int d) { return of.keys.at(d, slot); });
      put_into(of.values, key + kv_width, of.value_scales + slot, HIGHEST_VALUE,
               [&](int d) { return of.values.at(slot, d); });
    }
  }

  // Writes a head's keys or values of one slot to the entries at(d), and their scale if they have
  // one.
  template <class At>
  void put_into(const Matrix<Cached>& cache, const float* numbers, const float* scale,
                float highest, At at) const {
    if constexpr (WHOLE<Cached>) {
      float padded[MAX_DUOS] = {};
      int16_t rounded[MAX_DUOS];
      std::memcpy(padded, numbers, m.head_dim * sizeof(float));
      *(float*)scale = round_row(padded, head, highest,
                                 [&](int d, Ints some) { put_shorts(rounded + d, some); });
      for (int d = 0; d < m.head_dim; d++) ((int16_t*)cache.blocks)[at(d)] = rounded[d];
    } else {
      for (int d = 0; d < m.head_dim; d++) put((Embedding*)cache.blocks + at(d), numbers[d]);
    }
  }

  // Keys (a column a slot) and values (a row a slot) of one head. The scales of whole numbers, one
  // for each slot, stand behind all heads.
  struct Head {
    Matrix<Cached> keys, values;
    const float* value_scales;
  };
  Head cached(int layer, int sequence, int of_head) const {
    const ptrdiff_t size = (ptrdiff_t)slots * head / PACKED<Cached>;
    const int64_t kv = (int64_t)(s.first + sequence) * m.num_kv_heads + of_head;
    const Cached *keys = (const Cached*)s.keys[layer], *values = (const Cached*)s.values[layer];
    const auto scales = [&](const Cached* of) {
      return WHOLE<Cached> ? (const float*)(of + size * s.cached * m.num_kv_heads) + kv * slots
                           : nullptr;
    };
    return {{keys + kv * size, head, nullptr, scales(keys)},
            {values + kv * size, seen, nullptr, nullptr, slots},
            scales(values)};
  }

  // Attention of some queries to one head of the cache. Queries of all lanes and heads that share
  // it count as rows, heads of a lane in a row.
  void attend(int sequence, int kv, int64_t first, int count, int layer, float* memory) const {
    const Head of = cached(layer, sequence, kv);
    Attending queries(memory, count, head, LOG2_E / std::sqrt((float)m.head_dim));
    for (int r = 0; r < count; r++)
      std::memcpy(queries.query(r), projected + place(sequence, kv, first + r, qkv_stride),
                  m.head_dim * sizeof(float));
    const ptrdiff_t skip = starts[sequence] + (m.weights[layer].slides ? rows : 0);
    const auto row = [&](int r) { return skip + (first + r) / group; };
    queries.read(
        of.keys, of.values, of.value_scales, parts,
        [&](int r) { return hidden_slots + row(r) * seen; },
        [&](int r) { return spans + row(r) * parts; });
    for (int r = 0; r < count; r++)
      queries.write(r, mixed + place(sequence, kv, first + r, mixed_stride), m.head_dim);
  }

  // Where query r of head kv of a sequence begins, in an array with so many floats a row.
  ptrdiff_t place(int sequence, int kv, int64_t r, int stride) const {
    return (starts[sequence] + r / group) * stride + (kv * group + r % group) * m.head_dim;
  }

  // This thread's share of all attention: queries of a head stay together where they can, for they
  // read the same.
  void attend_share(int thread, int threads, int layer, float* memory) const {
    const int64_t heads = (int64_t)group * m.num_kv_heads, all = rows * heads;
    const int64_t end = all * (thread + 1) / threads;
    for (int64_t query = all * thread / threads, some; query < end; query += some) {
      const int sequence = fed[query / heads].sequence, begin = starts[sequence];
      const int64_t count = (int64_t)(starts[sequence + 1] - begin) * group;
      const int64_t own = query - begin * heads, first = own % count, max = Attending::MAX_QUERIES;
      const int64_t left = std::min(count - first, end - query), parts = (left + max - 1) / max;
      some = (left + parts - 1) / parts;
      if (parts > 1) some = std::min<int64_t>(left, ceil_to(some, Attending::AT_ONCE));
      attend(sequence, own / count, first, some, layer, memory);
    }
  }

  // silu(gate) * up, or gelu(up) as GPT-2 has it, on this thread's columns.
  void activate(int from, int to) const {
    for (int row = 0; row < rows; row++) {
      float* values = middle + (ptrdiff_t)row * middle_stride;
      for (int i = from; i < to; i += WIDTH) {
        const Floats v = load(values + i);
        const Floats u = m.gated ? v : (v + v * v * v * 0.044715f) * 1.5957691216f;
        const Floats activated = v / (1.0f + exp(-u));
        store(values + i, m.gated ? activated * load(values + inner + i) : activated);
      }
    }
  }

  // The exact GELU of so many rows on this thread's columns: x times the normal distribution's
  // integral up to x, by Abramowitz and Stegun's 7.1.26, which is 1.5e-7 off at most.
  void activate_last(int count, int from, int to) const {
    for (int row = 0; row < count; row++) {
      float* values = middle + (ptrdiff_t)row * middle_stride;
      for (int i = from; i < to; i += WIDTH) {
        const Floats x = load(values + i), size = greater(x, -x);
        const Floats t = 1.0f / (1.0f + 0.3275911f * 0.70710678f * size);
        const Floats sum =
            ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t +
             0.254829592f) *
            t;
        const Floats tail = 0.5f * sum * exp(-0.5f * size * size);  // beyond `size`
        store(values + i, greater(x, splat(0.0f)) - size * tail);
      }
    }
  }

  // Whether the logits of a row are asked for: of the last `keep` lanes of a sequence, padding too.
  bool is_kept(int row) const { return !s.keep || fed[row].lane % s.lanes >= s.lanes - s.keep; }

  // `failed` turns 2, and nothing is written, where a thread gets no memory.
  void run(int thread, int threads, Barrier& barrier, float* normed, float* memory,
           std::atomic<int>& failed) const {
    Lap lap(thread ? nullptr : s.seconds);
    if (guarded([&] { return reserve(); })) failed = 2;
    // `of`: the rows of x to read, or add to, in order; null: all as they stand
    const auto normalise = [&](const float* weight, const float* bias, const int* of) {
      for (int row = 0; row < rows; row++)
        norm(m, x + (ptrdiff_t)(of ? of[row] : row) * x_stride, normed + (ptrdiff_t)row * x_stride,
             m.hidden_size, weight, bias, m.rms);
    };
    const auto add_product = [&](const float* in, int stride, const Matrix<W>& w, bool aside,
                                 int first, int count) {
      multiply_share(thread, threads, in, stride, w, hidden, aside ? projected : x, x_stride,
                     !aside, first, count);
    };
    const auto add_what_is_aside = [&](const float* post, const float* post_bias, const int* of) {
      barrier.wait(threads);
      if (!post && !of) return;
      for (int row = thread; row < rows; row += threads) {
        float* added = projected + (ptrdiff_t)row * x_stride;
        float* to = x + (ptrdiff_t)(of ? of[row] : row) * x_stride;
        if (post) norm(m, added, added, m.hidden_size, post, post_bias, m.rms);
        for (int i = 0; i < m.hidden_size; i++) to[i] += added[i];
      }
      barrier.wait(threads);
    };
    for (int row = thread; row < rows; row += threads) embed(row);
    for (int row = thread; row < rows; row += threads) {
      hide(row);
      const ptrdiff_t lane = fed[row].lane;
      const int64_t* by = s.coordinates ? s.coordinates + 3 * lane : s.at + lane;
      if (m.frequencies) turn_of(&m, by, turns + (ptrdiff_t)row * m.head_dim);
    }
    barrier.wait(threads);
    if (failed) return;
    lap(REST);
    for (int layer = 0; layer < m.num_layers; layer++) {
      const Layer& w = m.weights[layer];
      normalise(w.norm1, w.norm1_bias, nullptr);
      multiply_share(thread, threads, normed, x_stride,
                     matrix(w.qkv, hidden, w.qkv_bias, w.qkv_scale), qkv, projected, qkv_stride,
                     false, 0, rows);
      barrier.wait(threads);
      lap(LINEARS);
      // as in attention: most of a head is read by who writes it
      const int64_t heads = m.num_kv_heads;
      for (int h = heads * thread / threads; h < heads * (thread + 1) / threads; h++)
        write_cache(h, layer);
      barrier.wait(threads);
      lap(REST);
      attend_share(thread, threads, layer, memory);
      barrier.wait(threads);
      lap(ATTENTION);
      add_product(mixed, mixed_stride, matrix(w.out, attended, w.out_bias, w.out_scale), w.post1, 0,
                  rows);
      add_what_is_aside(w.post1, w.post1_bias, nullptr);
      const int* const of = w.visual_gate_up ? by_mlp : nullptr;
      const int plain = of ? num_plain : rows;
      normalise(w.norm2, w.norm2_bias, of);
      const int64_t blocks = inner / BLOCK;
      const int from = blocks * thread / threads, to = blocks * (thread + 1) / threads;
      const auto go_up = [&](const Matrix<W>& gate_up, int first, int count) {
        if (!count) return;
        const Input<W> both(normed + (ptrdiff_t)first * x_stride, x_stride, count, hidden, digits);
        float* const out = middle + (ptrdiff_t)first * middle_stride;
        multiply(both, gate_up, from, to, out, middle_stride, false);
        if (m.gated) multiply(both, gate_up, from + blocks, to + blocks, out, middle_stride, false);
      };
      go_up(matrix(w.gate_up, hidden, w.gate_up_bias, w.gate_up_scale), 0, plain);
      go_up(matrix(w.visual_gate_up, hidden, w.visual_gate_up_bias, w.visual_gate_up_scale), plain,
            rows - plain);
      activate(from * BLOCK, to * BLOCK);
      barrier.wait(threads);
      const auto go_down = [&](const Matrix<W>& down, int first, int count) {
        if (count) add_product(middle, middle_stride, down, w.post2 || of, first, count);
      };
      go_down(matrix(w.down, inner, w.down_bias, w.down_scale), 0, plain);
      go_down(matrix(w.visual_down, inner, w.visual_down_bias, w.visual_down_scale), plain,
              rows - plain);
      add_what_is_aside(w.post2, w.post2_bias, of);
      lap(LINEARS);
    }
    const int vocab = ceil_to(m.vocab_size, BLOCK);
    int kept = 0;
    for (int row = 0; row < rows; row++)
      if (is_kept(row))
        norm(m, x + (ptrdiff_t)row * x_stride, normed + (ptrdiff_t)kept++ * x_stride, m.hidden_size,
             m.norm, m.norm_bias, m.rms);
    const auto share = [&](const float* in, int stride, const Matrix<W>& w, int columns, float* out,
                           int out_stride) {
      const int64_t blocks = ceil_to(columns, BLOCK) / BLOCK;
      const int from = blocks * thread / threads, to = blocks * (thread + 1) / threads;
      multiply(Input<W>(in, stride, kept, w.K, digits), w, from, to, out, out_stride, false);
      return std::pair(from * BLOCK, to * BLOCK);
    };
    const float* in = normed;
    int K = hidden, in_stride = x_stride;
    if (m.head_size) {
      const auto [from, to] =
          share(in, in_stride, matrix(m.head_proj, hidden, m.head_proj_bias, m.head_proj_scale),
                last, middle, middle_stride);
      activate_last(kept, from, to);
      barrier.wait(threads);
      in = middle, K = last, in_stride = middle_stride;
    }
    share(in, in_stride, matrix(m.head, K, m.head_bias, m.head_scale), vocab, s.logits, vocab);
    lap(LINEARS);
  }
};

// Angles of later ones are off by 1e-5 in float64.
constexpr int64_t MAX_POSITIONS = (int64_t)1 << 36;

// Whether every index is inside its table: what the Python side cannot see without a copy.
bool in_range(const Model& m, const Step& s) {
  const auto inside = [](int64_t index, int64_t size) { return 0 <= index && index < size; };
  bool good = s.visible_slots <= s.num_slots;
  for (int64_t i = 0; i < (int64_t)s.sequences * s.lanes; i++)
    good &= inside(s.tokens[i], m.num_embeddings) && inside(s.slots[i], s.num_slots) &&
            inside(s.at[i], m.frequencies ? MAX_POSITIONS : m.max_positions);
  return good;
}

// Puts the logits of rows that are no padding in their places, zeros in those of padding.
template <class W>
void spread(const Decoder<W>& d) {
  const Step& s = d.s;
  const int64_t vocab = ceil_to(d.m.vocab_size, BLOCK), all = (int64_t)s.sequences * s.keep;
  int row = d.rows - 1;
  int64_t kept = 0;
  for (int r = 0; r < d.rows; r++) kept += d.is_kept(r);
  if (kept == all) return;
  for (int64_t to = all - 1; to >= 0; to--) {
    const int64_t lane = to / s.keep * s.lanes + s.lanes - s.keep + to % s.keep;
    while (row >= 0 && d.fed[row].lane > lane) row--;
    float* const place = s.logits + to * vocab;
    if (row >= 0 && d.fed[row].lane == lane)
      std::memmove(place, s.logits + --kept * vocab, vocab * sizeof(float));
    else
      std::fill(place, place + vocab, 0.0f);
  }
}

template <class W>
int decode(const Model& m, const Step& s) {
  if (!in_range(m, s)) return 1;
  static thread_local std::vector<float> memory;
  static thread_local std::vector<Row> fed;
  static thread_local std::vector<int> starts, by_mlp;
  make_room(fed, (uint64_t)s.sequences * s.lanes + 1);
  make_room(starts, (uint64_t)s.sequences + 1);
  int count = starts[0] = 0;
  for (int sequence = 0; sequence < s.sequences; sequence++) {
    for (int i = sequence * s.lanes; i < (sequence + 1) * s.lanes; i++)
      if (s.slots[i] != s.num_slots - 1) fed[count++] = {i, sequence};
    starts[sequence + 1] = count;
  }
  make_room(by_mlp, (uint64_t)count + 1);
  int num_plain = 0, num_visual = 0;
  for (int row = 0; row < count; row++)
    if (s.tokens[fed[row].lane] >= m.vocab_size) by_mlp[num_plain++] = row;
  for (int row = 0; row < count; row++)
    if (s.tokens[fed[row].lane] < m.vocab_size) by_mlp[num_plain + num_visual++] = row;
  Decoder<W> d{m, s, fed.data(), starts.data(), by_mlp.data(), num_plain};
  const uint64_t rows = d.rows, mixed = rows * d.mixed_stride;
  const uint64_t seers = rows * (m.sliding_window ? 2 : 1);
  const uint64_t normed = rows * d.x_stride, mask = seers * d.seen, spans = seers * d.parts * 2;
  const uint64_t turns = rows * m.head_dim;
  const uint64_t line = 64 / sizeof(float);  // of the cache: threads do not share one
  const uint64_t own = (normed + Decoder<W>::Attending::floats(d.head)) / line * line + line;
  const uint64_t all = s.threads * own + line;
  const uint64_t needed =
      normed + rows * (d.qkv_stride + d.middle_stride) + mixed + mask + spans + all + turns;
  make_room(memory, needed);
  d.x = memory.data();
  d.projected = d.x + normed;
  d.middle = d.projected + rows * d.qkv_stride;
  d.mixed = d.middle + rows * d.middle_stride;
  d.hidden_slots = d.mixed + mixed;
  d.spans = (Span*)(d.hidden_slots + mask);
  d.turns = d.hidden_slots + mask + spans;
  // What the threads own is made here, for they could not say that there is no memory.
  const uintptr_t end = (uintptr_t)(d.turns + turns);
  float* const owned = (float*)((end + 63) / 64 * 64);
  std::memset(d.mixed, 0, mixed * sizeof(float));  // padding has to be zero, or finite
  std::atomic<int> failed{0};
  if (count)
    team.run(s.threads, [&](int thread, int threads, Barrier& barrier) {
      float* here = owned + thread * own;
      std::memset(here, 0, normed * sizeof(float));
      d.run(thread, threads, barrier, here, here + normed, failed);
    });
  if (!failed && s.keep) spread(d);
  return failed;
}

}  // namespace

// Reads numbers as fast as this machine can: the ceiling that a one-lane step is measured against.
extern "C" float stream(const float* numbers, int64_t count, int threads) {
  std::atomic<float> total{0};
  team.run(threads, [&](int64_t part, int parts, Barrier&) {
    Floats sums[8] = {};
    const float* to = numbers + count / parts * (part + 1);
    for (const float* p = numbers + count / parts * part; p + 8 * WIDTH <= to; p += 8 * WIDTH)
      for (int i = 0; i < 8; i++) {
        __builtin_prefetch(p + i * WIDTH + 64 * WIDTH);
        sums[i] += load(p + i * WIDTH);
      }
    for (int i = 1; i < 8; i++) sums[0] += sums[i];
    for (int i = 0; i < WIDTH; i++) total += sums[0][i];
  });
  return total;
}

// Each returns 0, or without having done anything 1 where an index is out of range, 2 where there
// is not enough memory.
extern "C" int decode_f32(const Model* m, const Step* s) {
  return guarded([&] { return decode<float>(*m, *s); });
}
extern "C" int decode_bf16(const Model* m, const Step* s) {
  return guarded([&] { return decode<Pair>(*m, *s); });
}
extern "C" int decode_int8(const Model* m, const Step* s) {
  return guarded([&] { return decode<Quad>(*m, *s); });
}
