// One decoding step of a diagd Transformer in 4 * layers + 3 dispatches:
// embed, then for each layer project, attend, expand and contract, then predict and draw.
//
// `diagd/backends/webgpu/shader.py` writes sizes, and ROWS, the rows of a tile, before this text. A
// row is a lane of a batch row. Weights of norms are folded into the matrices that follow them, but
// where these are of 8 bits (INT8): then `vector` ends in a scale for each column, and in the
// weights of the norm before (HIDDEN).

struct Step {
  lanes: u32,      // of the step
  rows: u32,       // lanes * batch size
  keep: u32,       // the last so many lanes get logits
  reach: u32,      // cache slots [0, reach) are read
  slots: u32,      // of the cache
  stride: u32,     // tokens of a batch row
  held: u32,       // where `memory` has the position of each slot, its step, and then the seeds
  first: u32,      // where `lanes` has the first lane
  mask: u32,       // where `lanes` has a mask (lanes, reach), or 0: the rule of visibility holds;
                   // 1: seen, 2: by sliding layers, too
  capacity: u32,   // rows that `arena` is for
  top_k: u32,      // 0: all
  exclusive: u32,  // whether the id that crosses top_p falls
  temperature: f32,
  top_p: f32,
}

@group(0) @binding(0) var<uniform> task: Step;
@group(0) @binding(1) var<storage, read> lanes: array<i32>;
@group(0) @binding(2) var<storage, read_write> memory: array<i32>;  // tokens, held, fed_at, seeds
@group(0) @binding(3) var<storage, read_write> arena: array<f32>;   // activations
@group(1) @binding(0) var<storage, read> matrix: array<Packed>;     // (K / 4, N), four of a column
@group(1) @binding(1) var<storage, read> vector: array<f32>;
@group(1) @binding(2) var<storage, read_write> cache: array<f32>;   // of a layer: keys, values

const THREADS = 256u;
const COLUMNS = 32u;  // of a tile
const PARTS = 8u;     // of its sums: THREADS / COLUMNS

// Fields of a lane; the cosines and sines of its position follow (HEAD_DIM numbers).
const POSITION = 0u; const SLOT = 1u; const INPUT = 2u; const OUTPUT = 3u; const STEP = 4u;
const FRAME = 5u; const ROW = 6u; const COLUMN = 7u; const LOW = 8u; const HIGH = 9u;
const TURNS = 10u; const LANE = TURNS + HEAD_DIM;

// Where arrays of so many floats a row begin, in units of `capacity` floats.
const Q_WIDTH = HEADS * HEAD_DIM;
const KV_WIDTH = KV_HEADS * HEAD_DIM;
const QKV = Q_WIDTH + 2u * KV_WIDTH;
const X = 0u;                                // HIDDEN: the residual stream before a layer
const MIDDLE = HIDDEN;                       // HIDDEN: after its attention
const PROJECTED = MIDDLE + HIDDEN;           // QKV
const QUERIES = PROJECTED + QKV;             // Q_WIDTH, rotated
const MIXED = QUERIES + Q_WIDTH;             // HEADS * HIDDEN: what each head adds to the stream
const INNER = MIXED + HEADS * HIDDEN;        // INTERMEDIATE
const LOGITS = INNER + INTERMEDIATE;         // VOCAB

var<private> thread: u32;
var<private> tile: array<u32, ROWS>;         // rows of this workgroup's tile, the last one repeated
var<workgroup> words: array<u32, THREADS>;
var<workgroup> means: array<f32, ROWS>;
var<workgroup> scales: array<f32, ROWS>;
var<workgroup> partial: array<f32, (PARTS - 1u) * COLUMNS * ROWS>;
var<workgroup> query: array<f32, HEAD_DIM>;
var<workgroup> chances: array<f32, THREADS>;

fn at(region: u32, width: u32, row: u32) -> u32 { return task.capacity * region + row * width; }
fn lane_of(row: u32) -> u32 { return task.first + row % task.lanes * LANE; }

// The order of floats as one of whole numbers: NaN is below -inf or above +inf.
fn key_of(x: f32) -> u32 {
  let bits = bitcast<u32>(x);
  return select(bits | 0x80000000u, ~bits, bits >> 31u == 1u);
}
fn float_of(key: u32) -> f32 {
  return bitcast<f32>(select(~key, key & 0x7fffffffu, key >> 31u == 1u));
}

// The highest number of all threads.
fn highest(value: u32) -> u32 {
  words[thread] = value;
  workgroupBarrier();
  if (thread < 16u) {
    for (var i = 1u; i < 16u; i++) { words[thread] = max(words[thread], words[thread + 16u * i]); }
  }
  workgroupBarrier();
  var best = words[0];
  for (var i = 1u; i < 16u; i++) { best = max(best, words[i]); }
  workgroupBarrier();
  return best;
}

// The sum of the numbers of all threads.
fn total(value: f32) -> f32 {
  words[thread] = bitcast<u32>(value);
  workgroupBarrier();
  if (thread < 16u) {
    var sum = 0.0;
    for (var i = 0u; i < 16u; i++) { sum += bitcast<f32>(words[thread + 16u * i]); }
    words[thread] = bitcast<u32>(sum);
  }
  workgroupBarrier();
  var sum = 0.0;
  for (var i = 0u; i < 16u; i++) { sum += bitcast<f32>(words[i]); }
  workgroupBarrier();
  return sum;
}

// Begin a tile of rows, of which there are `count`.
fn begin(index: u32, first: u32, count: u32) {
  thread = index;
  for (var r = 0u; r < ROWS; r++) { tile[r] = min(first * ROWS + r, count - 1u); }
  if (thread < ROWS) { means[thread] = 0.0; scales[thread] = 1.0; }
  workgroupBarrier();
}

// The sum that 16 threads made of a row, to all of them that are its first.
fn sum_of_row(value: f32) -> f32 {
  words[thread] = bitcast<u32>(value);
  workgroupBarrier();
  var sum = 0.0;
  if (thread < ROWS) {
    for (var i = 0u; i < 16u; i++) { sum += bitcast<f32>(words[thread * 16u + i]); }
  }
  workgroupBarrier();
  return sum;
}

// Means and scales by which the rows of a tile (HIDDEN) are normalised.
fn measure(region: u32) {
  let r = min(thread / 16u, ROWS - 1u);
  let row = at(region, HIDDEN, tile[r]);
  if (LAYER_NORM) {
    var sum = 0.0;
    for (var k = thread % 16u; k < HIDDEN; k += 16u) { sum += arena[row + k]; }
    sum = sum_of_row(sum);
    if (thread < ROWS) { means[thread] = sum / f32(HIDDEN); }
    workgroupBarrier();
  }
  var squares = 0.0;
  for (var k = thread % 16u; k < HIDDEN; k += 16u) {
    let x = arena[row + k] - means[r];
    squares += x * x;
  }
  squares = sum_of_row(squares);
  if (thread < ROWS) { scales[thread] = inverseSqrt(squares / f32(HIDDEN) + EPS); }
  workgroupBarrier();
}

// Products of the tile's rows (K, normalised) with COLUMNS columns from `first` on; the first
// COLUMNS threads have the sums of a column each. Scales stand in `vector` from `scales_at` on.
fn multiply(
  region: u32, K: u32, N: u32, first: u32, scales_at: u32, normed: bool,
) -> array<f32, ROWS> {
  let part = thread / COLUMNS;
  let column = min(first + thread % COLUMNS, N - 1u);
  var sums: array<f32, ROWS>;
  for (var k = part; k < K / 4u; k += PARTS) {
    var weights = unpack(matrix[k * N + column]);
    if (INT8 && normed) {
      let at = scales_at + N + 4u * k;
      weights *= vec4f(vector[at], vector[at + 1u], vector[at + 2u], vector[at + 3u]);
    }
    for (var r = 0u; r < ROWS; r++) {
      let start = at(region, K, tile[r]) + 4u * k;
      let x = vec4f(arena[start], arena[start + 1u], arena[start + 2u], arena[start + 3u]);
      sums[r] += dot((x - means[r]) * scales[r], weights);
    }
  }
  if (part > 0u) {
    for (var r = 0u; r < ROWS; r++) {
      partial[r * (THREADS - COLUMNS) + thread - COLUMNS] = sums[r];
    }
  }
  workgroupBarrier();
  if (part == 0u) {
    for (var r = 0u; r < ROWS; r++) {
      for (var i = 0u; i < PARTS - 1u; i++) {
        sums[r] += partial[r * (THREADS - COLUMNS) + i * COLUMNS + thread];
      }
      if (INT8) { sums[r] *= vector[scales_at + column]; }
    }
  }
  workgroupBarrier();
  return sums;
}

// A workgroup for each row. `matrix` has the embeddings, `vector` those of learned positions.
@compute @workgroup_size(THREADS)
fn embed(@builtin(local_invocation_index) index: u32, @builtin(workgroup_id) group: vec3u) {
  let lane = lane_of(group.x);
  let start = group.x / task.lanes * task.stride + u32(lanes[lane + INPUT]);
  let id = u32(max(memory[start], 0));  // what was not drawn is no id
  for (var k = index; k < HIDDEN / 4u; k += THREADS) {
    let x = embedded(id * HIDDEN / 4u + k);
    for (var i = 0u; i < 4u; i++) {
      var value = x[i];
      if (LEARNED) { value += vector[u32(lanes[lane + POSITION]) * HIDDEN + 4u * k + i]; }
      arena[at(X, HIDDEN, group.x) + 4u * k + i] = value;
    }
  }
}

// A workgroup for each head of queries, keys or values, and each tile: normalise, project, rotate,
// write keys and values to the cache. `vector`: biases, then the weights of the heads' own norms.
@compute @workgroup_size(THREADS)
fn project(@builtin(local_invocation_index) index: u32, @builtin(workgroup_id) group: vec3u) {
  begin(index, group.y, task.rows);
  measure(X);
  let base = group.x * HEAD_DIM;
  for (var c = 0u; c < HEAD_DIM; c += COLUMNS) {
    let sums = multiply(X, HIDDEN, QKV, base + c, QKV + select(0u, 2u * HEAD_DIM, QK_NORM), true);
    if (thread < min(COLUMNS, HEAD_DIM - c)) {
      for (var r = 0u; r < ROWS; r++) {
        if (group.y * ROWS + r < task.rows) {
          let column = base + c + thread;
          arena[at(PROJECTED, QKV, tile[r]) + column] = sums[r] + vector[column];
        }
      }
    }
  }
  storageBarrier();
  workgroupBarrier();
  let kind = select(select(2u, 1u, group.x < HEADS + KV_HEADS), 0u, group.x < HEADS);
  let half = HEAD_DIM / 2u;
  for (var i = thread; i < ROWS * half; i += THREADS) {
    let row = group.y * ROWS + i / half;
    if (row >= task.rows) { break; }
    let pair = i % half;
    let start = at(PROJECTED, QKV, row) + base;
    let lane = lane_of(row);
    var x = arena[start + pair];
    var y = arena[start + half + pair];
    if (QK_NORM && kind < 2u) {
      var squares = 0.0;
      for (var d = 0u; d < HEAD_DIM; d++) { squares += arena[start + d] * arena[start + d]; }
      let scale = inverseSqrt(squares / f32(HEAD_DIM) + EPS);
      x *= scale * vector[QKV + kind * HEAD_DIM + pair];
      y *= scale * vector[QKV + kind * HEAD_DIM + half + pair];
    }
    let cosine = bitcast<f32>(lanes[lane + TURNS + pair]);
    let sine = bitcast<f32>(lanes[lane + TURNS + half + pair]);
    let slot = u32(lanes[lane + SLOT]);
    let batch = row / task.lanes;
    if (kind == 0u) {
      let to = at(QUERIES, Q_WIDTH, row) + base;
      arena[to + pair] = x * cosine - y * sine;
      arena[to + half + pair] = y * cosine + x * sine;
    } else if (kind == 1u) {  // (B, heads, HEAD_DIM, slots)
      let to = (batch * KV_HEADS + group.x - HEADS) * HEAD_DIM;
      cache[(to + pair) * task.slots + slot] = x * cosine - y * sine;
      cache[(to + half + pair) * task.slots + slot] = y * cosine + x * sine;
    } else {  // (B, heads, slots, HEAD_DIM), behind the keys
      let head = batch * KV_HEADS + group.x - HEADS - KV_HEADS;
      let all = task.rows / task.lanes * KV_WIDTH * task.slots;
      let to = all + (head * task.slots + slot) * HEAD_DIM;
      cache[to + pair] = x;
      cache[to + half + pair] = y;
    }
  }
}

// The rule of visibility (diagd/decoding/visibility.py), or a mask, where a layer may slide.
fn sees(row: u32, slot: u32, slides: bool) -> bool {
  if (task.mask != 0u) {
    return lanes[task.mask + row % task.lanes * task.reach + slot] > select(0, 1, slides);
  }
  let position = lanes[lane_of(row) + POSITION];
  let held = memory[task.held + slot];
  let fed_at = memory[task.held + task.slots + slot];
  if (slides && position - held >= SLIDING_WINDOW) { return false; }
  return held == position || (held < position && fed_at <= lanes[lane_of(row) + STEP]);
}

// A workgroup for each row and head: softmax attention, and what it adds to the residual stream.
@compute @workgroup_size(THREADS)
fn attend(@builtin(local_invocation_index) index: u32, @builtin(workgroup_id) group: vec3u) {
  attend_to(index, group, false);
}

@compute @workgroup_size(THREADS)
fn attend_sliding(
  @builtin(local_invocation_index) index: u32, @builtin(workgroup_id) group: vec3u,
) {
  attend_to(index, group, true);
}

fn attend_to(index: u32, group: vec3u, slides: bool) {
  thread = index;
  let row = group.x;
  let head = group.y;
  let cached = row / task.lanes * KV_HEADS + head / (HEADS / KV_HEADS);
  let keys = cached * HEAD_DIM * task.slots;
  let values = task.rows / task.lanes * KV_WIDTH * task.slots + keys;
  let part = thread / HEAD_DIM;
  let parts = THREADS / HEAD_DIM;
  if (thread < HEAD_DIM) {
    query[thread] = arena[at(QUERIES, Q_WIDTH, row) + head * HEAD_DIM + thread];
  }
  workgroupBarrier();
  var best = -1e30;
  var sum = 0.0;    // of this thread's slots
  var mixed = 0.0;  // of this thread's column and part
  for (var base = 0u; base < task.reach; base += THREADS) {
    let slot = base + thread;
    var seen = false;
    if (slot < task.reach) { seen = sees(row, slot, slides); }
    var score = -1e30;
    if (seen) {
      score = 0.0;
      for (var d = 0u; d < HEAD_DIM; d++) {
        score += query[d] * cache[keys + d * task.slots + slot];
      }
      score *= inverseSqrt(f32(HEAD_DIM));
    }
    let peak = max(best, float_of(highest(key_of(score))));
    let shrink = exp(best - peak);
    chances[thread] = select(0.0, exp(score - peak), seen);
    workgroupBarrier();
    sum = sum * shrink + chances[thread];
    mixed *= shrink;
    if (part < parts) {
      for (var i = part; i < min(THREADS, task.reach - base); i += parts) {
        mixed += chances[i] * cache[values + (base + i) * HEAD_DIM + thread % HEAD_DIM];
      }
    }
    best = peak;
  }
  sum = total(sum);
  chances[thread] = mixed;
  workgroupBarrier();
  if (thread < HEAD_DIM) {
    for (var i = 1u; i < parts; i++) { mixed += chances[i * HEAD_DIM + thread]; }
    query[thread] = select(0.0, mixed / sum, sum > 0.0);
  }
  workgroupBarrier();
  for (var n = thread; n < HIDDEN; n += THREADS) {
    var out = 0.0;
    for (var d = 0u; d < HEAD_DIM; d += 4u) {
      let x = vec4f(query[d], query[d + 1u], query[d + 2u], query[d + 3u]);
      out += dot(x, unpack(matrix[(head * HEAD_DIM + d) / 4u * HIDDEN + n]));
    }
    if (INT8) { out *= vector[n]; }
    arena[at(MIXED, HEADS * HIDDEN, row) + head * HIDDEN + n] = out;
  }
}

// A workgroup for COLUMNS inner columns of a tile: add what the heads found, normalise, project,
// activate. All of them write the same bits to MIDDLE. `vector`: biases of attention, then their
// own.
@compute @workgroup_size(THREADS)
fn expand(@builtin(local_invocation_index) index: u32, @builtin(workgroup_id) group: vec3u) {
  begin(index, group.y, task.rows);
  for (var i = thread; i < ROWS * HIDDEN; i += THREADS) {
    let row = group.y * ROWS + i / HIDDEN;
    if (row >= task.rows) { break; }
    let k = i % HIDDEN;
    var x = arena[at(X, HIDDEN, row) + k] + vector[k];
    for (var head = 0u; head < HEADS; head++) {
      x += arena[at(MIXED, HEADS * HIDDEN, row) + head * HIDDEN + k];
    }
    arena[at(MIDDLE, HIDDEN, row) + k] = x;
  }
  storageBarrier();
  workgroupBarrier();
  measure(MIDDLE);
  let column = group.x * COLUMNS + thread;
  let width = select(INTERMEDIATE, 2u * INTERMEDIATE, GATED);
  let start = group.x * COLUMNS;
  let first = multiply(MIDDLE, HIDDEN, width, start, HIDDEN + width, true);
  var second: array<f32, ROWS>;
  if (GATED) {
    second = multiply(MIDDLE, HIDDEN, width, INTERMEDIATE + start, HIDDEN + width, true);
  }
  if (thread >= COLUMNS || column >= INTERMEDIATE) { return; }
  for (var r = 0u; r < ROWS; r++) {
    if (group.y * ROWS + r >= task.rows) { break; }
    let x = first[r] + vector[HIDDEN + column];
    let steep = select(1.5957691216 * (x + 0.044715 * x * x * x), x, GATED);
    var y = x / (1.0 + exp(min(-steep, 80.0)));
    if (GATED) { y *= second[r] + vector[HIDDEN + INTERMEDIATE + column]; }
    arena[at(INNER, INTERMEDIATE, tile[r]) + column] = y;
  }
}

// A workgroup for COLUMNS columns of a tile: project back, and add to the residual stream.
@compute @workgroup_size(THREADS)
fn contract(@builtin(local_invocation_index) index: u32, @builtin(workgroup_id) group: vec3u) {
  begin(index, group.y, task.rows);
  let sums = multiply(INNER, INTERMEDIATE, HIDDEN, group.x * COLUMNS, HIDDEN, false);
  let column = group.x * COLUMNS + thread;
  if (thread >= COLUMNS || column >= HIDDEN) { return; }
  for (var r = 0u; r < ROWS; r++) {
    if (group.y * ROWS + r >= task.rows) { break; }
    let start = at(MIDDLE, HIDDEN, tile[r]) + column;
    arena[at(X, HIDDEN, tile[r]) + column] = arena[start] + vector[column] + sums[r];
  }
}

// A workgroup for COLUMNS ids of a tile of the rows kept: the final norm and the logits.
@compute @workgroup_size(THREADS)
fn predict(@builtin(local_invocation_index) index: u32, @builtin(workgroup_id) group: vec3u) {
  let kept = task.rows / task.lanes * task.keep;
  begin(index, group.y, kept);
  for (var r = 0u; r < ROWS; r++) {
    tile[r] = tile[r] / task.keep * task.lanes + task.lanes - task.keep + tile[r] % task.keep;
  }
  measure(X);
  let sums = multiply(X, HIDDEN, VOCAB, group.x * COLUMNS, VOCAB, true);
  let column = group.x * COLUMNS + thread;
  if (thread >= COLUMNS || column >= VOCAB) { return; }
  for (var r = 0u; r < ROWS; r++) {
    if (group.y * ROWS + r >= kept) { break; }
    arena[at(LOGITS, VOCAB, group.y * ROWS + r) + column] = sums[r] + vector[column];
  }
}

fn scramble(value: u32) -> u32 {
  var bits = (value ^ (value >> 16u)) * 0x7FEB352Du;
  bits = (bits ^ (bits >> 15u)) * 0x846CA68Bu;
  return bits ^ (bits >> 16u);
}

// Gumbel noise of an id, as in diagd/decoding/sampling.py.
fn noise_of(key: u32, id: u32) -> f32 {
  let bits = scramble(key ^ scramble(id + 0x9E3779B9u));
  let u = min((f32(bits) + 0.5) * 0x1p-32f, 1.0 - 0x1p-24f);
  // log1p, which WGSL lacks: large noise comes from small numbers
  return -log(select(-log(1.0 - u), u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * 0.25))), u < 0.01));
}

var<private> logits: u32;  // of the row that is drawn
var<private> low: u32;
var<private> high: u32;
var<private> heat: f32;
var<private> peak: f32;

fn score_of(id: u32) -> f32 { return arena[logits + id] / heat; }

// The number of ids whose keys are at least `bar`, or, without `counts`, the sum of
// exp(score - peak).
fn weight_of(bar: u32, counts: bool) -> f32 {
  var weight = 0.0;
  for (var id = low + thread; id < high; id += THREADS) {
    let score = score_of(id);
    if (key_of(score) >= bar) { weight += select(exp(score - peak), 1.0, counts); }
  }
  return total(weight);
}

// The highest bar, `lowest` at least, for which ids weigh `least` or more.
fn threshold(least: f32, lowest: u32, counts: bool) -> u32 {
  var bar = 0u;
  for (var bit = 31u; bit < 32u; bit--) {
    let tried = bar | (1u << bit);
    if (weight_of(max(tried, lowest), counts) >= least) { bar = tried; }
  }
  return max(bar, lowest);
}

// A workgroup for each row: draw its token and write it. Rules and their order are those of
// diagd/decoding/sampling.py, but that equals at the end of the nucleus all stay.
@compute @workgroup_size(THREADS)
fn draw(@builtin(local_invocation_index) index: u32, @builtin(workgroup_id) group: vec3u) {
  thread = index;
  let lane = lane_of(group.x);
  logits = at(LOGITS, VOCAB, group.x);
  low = u32(lanes[lane + LOW]);
  high = u32(lanes[lane + HIGH]);
  heat = select(1.0, task.temperature, task.temperature > 0.0);
  var top = 0u;
  var lowest = 0u;  // the complement of the lowest key, so that both are maxima
  for (var id = low + thread; id < high; id += THREADS) {
    let key = key_of(score_of(id));
    top = max(top, key);
    lowest = max(lowest, ~key);
  }
  top = highest(top);
  lowest = ~highest(lowest);
  peak = float_of(top);
  var bar = 0u;
  if (task.top_k > 0u) { bar = threshold(min(f32(task.top_k), f32(high - low)), 0u, true); }
  if (task.top_p < 1.0) {
    let least = task.top_p * weight_of(bar, false);
    bar = threshold(least, bar, false);
    let crosses = weight_of(bar, false) > least && bar < top;
    bar += select(0u, 1u, crosses && task.exclusive != 0u);
  }
  let batch = group.x / task.lanes;
  let seed = task.held + 2u * task.slots + 2u * batch;
  var key = scramble(u32(memory[seed]) ^ scramble(u32(memory[seed + 1u]) ^ 0x9E3779B9u));
  for (var field = FRAME; field <= COLUMN; field++) {
    key = scramble(key ^ scramble(u32(lanes[lane + field]) + 0x85EBCA6Bu));
  }
  var best = 0u;
  var winner = 0u;
  for (var id = low + thread; id < high; id += THREADS) {
    var score = score_of(id);
    if (key_of(score) >= bar) {
      if (task.temperature > 0.0) { score += noise_of(key, id); }
      if (key_of(score) > best) { best = key_of(score); winner = id; }
    }
  }
  let won = highest(best);
  let id = ~highest(select(0u, ~winner, best == won));
  // where a score is NaN or +inf, or all are -inf, no id is the best
  let broken = top >= 0xff800000u || top <= 0x007fffffu || lowest < 0x007fffffu;
  if (thread == 0u) {
    memory[batch * task.stride + u32(lanes[lane + OUTPUT])] = select(i32(id), -1, broken);
  }
}
