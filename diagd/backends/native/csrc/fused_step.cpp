// A step as one call: gather, decode, draw, scatter, as `run_step` of diagd/decoding/step.py.
#include <algorithm>
#include <vector>

#include "kernels.h"
#include "records.h"

extern "C" {
int decode_f32(const Model* m, const Step* s);
int decode_bf16(const Model* m, const Step* s);
int decode_int8(const Model* m, const Step* s);
int draw(const Draw* draw);
}

namespace {

// As in decoding/step.py.
enum { POSITIONS, SLOTS, INPUTS, OUTPUTS, STEPS, FRAMES, ROWS, COLUMNS, TURNS };

int run_step(int (*decode)(const Model*, const Step*), const Model& m, Step s, const Space& space) {
  static thread_local std::vector<int64_t> memory;
  static thread_local std::vector<float> logits;
  static thread_local std::vector<Draw> draws;
  const uint64_t all = (uint64_t)s.sequences * s.lanes;
  const int64_t stride = ceil_to(m.vocab_size, BLOCK), slots = s.num_slots, scratch = slots - 1;
  make_room(memory, (m.on_grid ? 15 : 12) * all);
  make_room(logits, all * stride);
  int64_t* next = memory.data();
  const auto room = [&] { return (next += all) - all; };
  int64_t *const tokens = room(), *const at = room(), *const into = room(), *const steps = room();
  int count = 0;  // of lanes that are no padding, of which is told
  int64_t *const outputs = room(), *const frames = room(), *const rows = room();
  int64_t *const columns = room(), *const low = room(), *const high = room(), *const seeds = room();
  int64_t *const drawn = room(), *const coordinates = m.on_grid ? room() : nullptr;
  const auto inside = [](int64_t i, int64_t size) { return 0 <= i && i < size; };
  const Drawing* drawing = space.drawings;
  int end = drawing->sequences;  // of those that are drawn in this way
  draws.clear();
  for (int i = 0; i < s.sequences; i++) {
    const int64_t sequence = s.first + i, first = sequence * slots;
    const bool changes = sequence >= end;
    while (sequence >= end) end += (++drawing)->sequences;
    if (changes || draws.empty()) {
      draws.push_back(drawing->rules);
      draws.back().count = 0;
    }
    for (int j = 0; j < s.lanes; j++) {
      const int64_t* lane = space.lanes + i * space.sequence_stride + j;
      const auto field = [&](int of) { return lane[of * space.field_stride]; };
      const int64_t input = field(INPUTS), output = field(OUTPUTS), k = (int64_t)i * s.lanes + j;
      if (!inside(input, slots) || !inside(output, slots)) return 1;
      at[k] = field(POSITIONS), into[k] = field(SLOTS), steps[k] = field(STEPS);
      tokens[k] = std::max<int64_t>(space.tokens[first + input], 0);  // what was not drawn is no id
      if (into[k] == scratch) continue;
      if (m.on_grid)
        for (int axis = 0; axis < 3; axis++) coordinates[3 * k + axis] = field(TURNS + axis);
      const int64_t row = field(ROWS), column = field(COLUMNS), n = count++;
      const int64_t* const bounds = drawing->by_place;
      if (bounds && !(inside(row, drawing->height) && inside(column, drawing->width))) return 1;
      const int64_t place = bounds ? 2 * (row * drawing->width + column) : 0;
      low[n] = bounds ? bounds[place] : drawing->low;
      high[n] = bounds ? bounds[place + 1] : drawing->high;
      outputs[n] = first + output, seeds[n] = space.seeds[sequence];
      frames[n] = field(FRAMES), rows[n] = row, columns[n] = column;
      draws.back().count++;
    }
  }
  s.keep = 0, s.held += s.first * slots, s.fed_at += s.first * slots;
  s.tokens = tokens, s.at = at, s.slots = into, s.steps = steps, s.coordinates = coordinates;
  s.logits = logits.data();
  if (const int failure = decode(&m, &s)) return failure;
  int64_t from = 0;
  for (Draw& d : draws) {
    d.vocab = m.vocab_size, d.stride = stride, d.threads = s.threads, d.seconds = s.seconds;
    d.logits = s.logits + from * stride, d.low = low + from, d.high = high + from;
    d.seeds = seeds + from, d.frames = frames + from, d.rows = rows + from;
    d.columns = columns + from, d.drawn = drawn + from;
    if (const int failure = draw(&d)) return failure;
    from += d.count;
  }
  for (int n = 0; n < count; n++) space.tokens[outputs[n]] = drawn[n];
  return 0;
}

}  // namespace

// Each returns 0, or without having written a token 1 where an index or a valid id is out of range,
// 2 where there is not enough memory.
extern "C" int take_f32(const Model* m, const Step* s, const Space* space) {
  return guarded([&] { return run_step(decode_f32, *m, *s, *space); });
}
extern "C" int take_bf16(const Model* m, const Step* s, const Space* space) {
  return guarded([&] { return run_step(decode_bf16, *m, *s, *space); });
}
extern "C" int take_int8(const Model* m, const Step* s, const Space* space) {
  return guarded([&] { return run_step(decode_int8, *m, *s, *space); });
}
