// A step as one call: gather, decode, draw, scatter, as `run_step` of diagd/decoding/engine.py.
#include <algorithm>
#include <vector>

#include "kernels.h"
#include "records.h"

extern "C" {
int decode_f32(const Model* m, const Step* s);
int decode_bf16(const Model* m, const Step* s);
int decode_int8(const Model* m, const Step* s);
int draw(const Draw* draw);
int size_of_space() { return sizeof(Space); }
}

namespace {

enum { POSITIONS, SLOTS, INPUTS, OUTPUTS, STEPS, FRAMES, ROWS, COLUMNS };  // decoding/engine.py

int take(int (*decode)(const Model*, const Step*), const Model& m, Step s, Draw d, const Space& space) {
  const auto lane = [&](int field) { return space.lanes + field * space.stride; };
  const auto inside = [&](int field, int64_t size) {
    const int64_t* of = lane(field);
    return std::all_of(of, of + s.lanes, [&](int64_t i) { return 0 <= i && i < size; });
  };
  if (!inside(INPUTS, space.slots) || !inside(OUTPUTS, space.slots)) return 1;
  if (space.by_place && !(inside(ROWS, space.height) && inside(COLUMNS, space.width))) return 1;
  static thread_local std::vector<int64_t> ids;
  static thread_local std::vector<float> logits;
  const uint64_t rows = (uint64_t)s.batch * s.lanes;
  d.stride = ceil_to(m.vocab, BLOCK);
  make_room(ids, 2 * rows + 2 * s.lanes);
  make_room(logits, rows * d.stride);
  int64_t *fed = ids.data(), *drawn = fed + rows, *low = drawn + rows, *high = low + s.lanes;
  for (int i = 0; i < s.lanes; i++) {
    for (int b = 0; b < s.batch; b++)  // what was not drawn is no id
      fed[b * s.lanes + i] = std::max<int64_t>(space.tokens[(int64_t)b * space.slots + lane(INPUTS)[i]], 0);
    const int64_t place = lane(ROWS)[i] * space.width + lane(COLUMNS)[i];
    low[i] = space.by_place ? space.by_place[2 * place] : space.low;
    high[i] = space.by_place ? space.by_place[2 * place + 1] : space.high;
  }
  s.keep = d.lanes = s.lanes;
  s.tokens = fed, s.at = lane(POSITIONS), s.slots = lane(SLOTS), s.steps = lane(STEPS);
  d.frames = lane(FRAMES), d.rows = lane(ROWS), d.columns = lane(COLUMNS);
  d.logits = s.logits = logits.data();
  d.low = low, d.high = high, d.drawn = drawn, d.threads = s.threads;
  if (const int failure = decode(&m, &s)) return failure;
  if (const int failure = draw(&d)) return failure;
  for (int b = 0; b < s.batch; b++)
    for (int i = 0; i < s.lanes; i++)
      space.tokens[(int64_t)b * space.slots + lane(OUTPUTS)[i]] = drawn[b * s.lanes + i];
  return 0;
}

}  // namespace

// Each returns 0, or without having written a token 1 where an index or a valid id is out of range, 2
// where there is not enough memory.
extern "C" int take_f32(const Model* m, const Step* s, const Draw* d, const Space* space) {
  return guarded([&] { return take(decode_f32, *m, *s, *d, *space); });
}
extern "C" int take_bf16(const Model* m, const Step* s, const Draw* d, const Space* space) {
  return guarded([&] { return take(decode_bf16, *m, *s, *d, *space); });
}
extern "C" int take_int8(const Model* m, const Step* s, const Draw* d, const Space* space) {
  return guarded([&] { return take(decode_int8, *m, *s, *d, *space); });
}
