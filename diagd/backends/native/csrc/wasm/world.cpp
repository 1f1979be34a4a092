// A world that plays in a browser: prompts, frames and pictures, on the kernels' own step.
//
// The file of a world is an image of these records, pointers counted from its beginning, and a list
// of where they stand (diagd/web/play/export.py writes it). The plans in it are those of
// diagd/decoding/schedule.py; the stream does as that of diagd/decoding/engine.py.
#include <cstdlib>
#include <limits>
#include <new>

#include "../records.h"
#include "painter.h"

#define EXPORT(name) extern "C" __attribute__((export_name(#name)))

// Vectors grow in several threads; what the toolchain has is for one.
namespace {
std::atomic<bool> allocating{false};
struct Alone {
  Alone() {
    while (allocating.exchange(true, std::memory_order_acquire)) {
    }
  }
  ~Alone() { allocating.store(false, std::memory_order_release); }
};
}  // namespace
void* operator new(size_t size) {
  const Alone alone;
  void* memory = std::aligned_alloc(64, (size + 63) / 64 * 64);
  if (!memory) __builtin_trap();
  return memory;
}
void operator delete(void* memory) noexcept {
  const Alone alone;
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept { operator delete(memory); }

// What belongs to a thread is never torn down: threads live as long as the page.
extern "C" int __cxa_thread_atexit(void (*)(void*), void*, void*) { return 0; }

extern "C" int take_int8(const Model* m, const Step* s, const Draw* d, const Space* space);
extern "C" int decode_int8(const Model* m, const Step* s);

struct Prompt {
  int32_t length, frames;  // tokens, and frames that they end with
  const int64_t* tokens;
};
struct Plan {  // DecodePlan: SCRATCH for the scratch slot
  int32_t steps, lanes;
  const int64_t* packed;  // (8, lanes)
  const int32_t *starts, *ends;
  const int64_t* fed_at;
};
struct World {
  uint32_t magic, version, size, checksum;  // size: of the records and what they point to
  int32_t prompts, actions, strategies;     // how many there are
  int32_t action_tokens, height, width;     // before a frame, and of one
  int32_t max_slots, top_k, exclusive_top_p, ops;
  int32_t patch, rounds_down;  // pixels of a token's side
  Draw rules;                  // nothing but `low` and `high`, of all places
  Space space;
  Model model;
  const Prompt* prompt;
  const int64_t* action;  // (actions, action_tokens)
  const Plan* plan;       // (strategies, 2): one frame of context, and more
  const float* codebook;  // (codes, channels rounded up to blocks)
  int32_t codes, channels;
  const Op* op;
};

namespace {

constexpr uint32_t MAGIC = 0x64676961, VERSION = 2;  // "aigd"
constexpr int64_t SCRATCH = -((int64_t)1 << 31), NEVER = ((int64_t)1 << 31) - 1;
constexpr int PREFILL_LANES = 256, READ = 64;  // BLOCK of diagd/decoding/engine.py

enum { POSITIONS, SLOTS, INPUTS, OUTPUTS, STEPS, FRAMES };  // of lanes
enum Failure { NONE, DAMAGED, OTHER_VERSION, OUT_OF_RANGE, NO_MEMORY, UNDRAWN_TOKEN };

uint32_t crc32(const uint8_t* bytes, size_t count) {
  uint32_t table[256], sum = ~0u;
  for (uint32_t i = 0; i < 256; i++) {
    table[i] = i;
    for (int bit = 0; bit < 8; bit++) table[i] = table[i] >> 1 ^ (table[i] & 1 ? 0xEDB88320 : 0);
  }
  for (size_t i = 0; i < count; i++) sum = sum >> 8 ^ table[(sum ^ bytes[i]) & 255];
  return ~sum;
}

class Stream {
 public:
  explicit Stream(const World& w) : w(w), m(w.model) {
    frame_tokens = w.height * w.width, per_frame = frame_tokens + w.action_tokens;
    scratch = w.max_slots + w.action_tokens, count = scratch + 1;
    const size_t slots = ceil_to(count, BLOCK), heads = m.kv_heads;
    const size_t size = heads * slots * (ceil_to(m.head_dim, BLOCK) + 2);
    cache.resize(2 * m.layers);
    for (auto& one : cache) one.resize(size), pointers.push_back(one.data());
    tokens.resize(count), held.resize(count), fed_at.resize(count), picked.resize(frame_tokens);
  }

  int64_t held_frames = 0, window = 0, generated = 0;

  Failure begin(const Prompt& prompt, uint64_t seed_) {
    seed = seed_, generated = 0, held_frames = prompt.frames;
    std::fill(held.begin(), held.end(), -1);
    for (int i = 0; i < prompt.length; i++) tokens[i] = prompt.tokens[i], held[i] = i;
    used = prompt.length;
    prefix = used - (prompt.frames * per_frame - w.action_tokens);
    window = prompt.frames + (w.max_slots - used) / per_frame;
    for (int from = 0; from < used - 1; from += PREFILL_LANES) {
      const int to = std::min<int>(from + PREFILL_LANES, used - 1);
      logits.resize(ceil_to(m.vocab, BLOCK));
      Step s = step();
      s.lanes = to - from, s.keep = 1, s.visible_slots = to;
      s.tokens = tokens.data() + from, s.at = s.slots = s.steps = held.data() + from;
      s.held = s.fed_at = held.data();
      s.logits = logits.data();
      if (const int failed = decode_int8(&m, &s)) return failed == 1 ? OUT_OF_RANGE : NO_MEMORY;
    }
    return NONE;
  }

  Failure advance(const int64_t* action, const Plan* plans, float temperature, float top_p) {
    const Plan& plan = plans[std::min<int64_t>(held_frames, 2) - 1];
    for (int i = 0; i < count; i++) fed_at[i] = held[i] >= 0 && held[i] < used ? -1 : NEVER;
    for (int i = 0; i < per_frame; i++) {
      const int64_t slot = slot_of(used + i);
      held[slot] = used + i, fed_at[slot] = plan.fed_at[i];
      if (i < w.action_tokens) tokens[slot] = action[i];
    }
    lanes.assign(plan.packed, plan.packed + 8 * plan.lanes);
    for (int i = 0; i < plan.lanes; i++) {
      lanes[POSITIONS * plan.lanes + i] += used, lanes[FRAMES * plan.lanes + i] += generated;
      for (const int field : {SLOTS, INPUTS, OUTPUTS}) {
        int64_t& slot = lanes[field * plan.lanes + i];
        slot = slot == SCRATCH ? scratch : slot_of(used + slot);
      }
    }
    Draw draw = w.rules;
    draw.batch = 1, draw.vocab = m.vocab, draw.seeds = (int64_t*)&seed;
    draw.top_k = w.top_k, draw.exclusive_top_p = w.exclusive_top_p;
    draw.temperature = temperature, draw.top_p = top_p;
    Space space = w.space;
    space.slots = count, space.tokens = tokens.data(), space.stride = plan.lanes;
    Step s = step();
    s.held = held.data(), s.fed_at = fed_at.data();
    for (int i = 0; i < plan.steps; i++) {
      const int64_t end = std::min<int64_t>(used + plan.ends[i], scratch);
      s.lanes = plan.starts[i + 1] - plan.starts[i];
      s.visible_slots = std::min<int64_t>((end + READ - 1) / READ * READ, count);
      space.lanes = lanes.data() + plan.starts[i];
      if (const int failed = take_int8(&m, &s, &draw, &space))
        return failed == 1 ? OUT_OF_RANGE : NO_MEMORY;
    }
    for (int i = 0; i < frame_tokens; i++) {
      picked[i] = tokens[slot_of(used + w.action_tokens + i)];
      if (picked[i] < 0) return UNDRAWN_TOKEN;
    }
    used += per_frame, generated++;
    held_frames = std::min(held_frames + 1, window);
    return NONE;
  }

  const int32_t* newest() const { return picked.data(); }

 private:
  Step step() {
    Step s{};
    s.batch = 1, s.num_slots = count, s.threads = team.threads;
    s.keys = pointers.data(), s.values = pointers.data() + m.layers;
    return s;
  }

  int64_t slot_of(int64_t position) const {
    const int64_t behind = position - prefix;
    return behind < 0 ? position : prefix + behind % (window * per_frame);
  }

  const World& w;
  const Model& m;
  int frame_tokens, per_frame, count;
  int64_t scratch, used = 0, prefix = 0;
  uint64_t seed = 0;
  std::vector<std::vector<int16_t>> cache;
  std::vector<void*> pointers;
  std::vector<int64_t> tokens, held, fed_at, lanes;
  std::vector<int32_t> picked;
  std::vector<float> logits;
};

World* world = nullptr;
Stream* stream = nullptr;
std::vector<uint8_t> pixels;

}  // namespace

EXPORT(allocate) void* allocate(size_t size) { return operator new(size); }
EXPORT(set_threads) void set_threads(int threads) { team.threads = threads; }
EXPORT(serve) void serve(int thread) {
#if defined(THREADS)
  team.serve(thread);
#endif
}

// Takes the file of a world, which stays where it is: 8 bytes a pointer behind `size`.
EXPORT(open_world) int open_world(uint8_t* file, uint32_t size) {
  World* w = (World*)file;
  if (size < sizeof(World) || w->magic != MAGIC) return DAMAGED;
  if (w->version != VERSION) return OTHER_VERSION;
  if (w->size < sizeof(World) || w->size > size || (size - w->size) % 4) return DAMAGED;
  const uint32_t sum = w->checksum;
  w->checksum = 0;
  if (crc32(file, size) != sum) return DAMAGED;
  for (uint32_t at = w->size; at < size; at += 4) {
    uint32_t where;
    std::memcpy(&where, file + at, 4);
    if (where > w->size - 4) return DAMAGED;
    *(uint32_t*)(file + where) += (uint32_t)(uintptr_t)file;
  }
  world = w;
  delete stream;
  stream = new Stream(*w);
  return NONE;
}

EXPORT(begin) int begin(int prompt, uint32_t seed) {
  if (prompt < 0 || prompt >= world->prompts) return OUT_OF_RANGE;
  return stream->begin(world->prompt[prompt], seed);
}

EXPORT(advance) int advance(int action, int strategy, float temperature, float top_p) {
  if (action < 0 || action >= world->actions || strategy < 0 || strategy >= world->strategies)
    return OUT_OF_RANGE;
  return stream->advance(world->action + action * world->action_tokens, world->plan + 2 * strategy,
                         temperature, top_p);
}

// The tokens of the newest frame, (height, width).
EXPORT(newest_tokens) const int32_t* newest_tokens() { return stream->newest(); }
EXPORT(held_frames) int held_frames() { return stream->held_frames; }
EXPORT(window_frames) int window_frames() { return stream->window; }

// Paints the tokens of the newest frame, RGBA.
EXPORT(paint) const uint8_t* paint() {
  const World& w = *world;
  Painter::Image image(w.height, w.width, w.channels);
  for (int i = 0; i < w.height * w.width; i++) {
    const int code = std::min(stream->newest()[i], w.codes - 1);
    std::memcpy(image.at(i / w.width, i % w.width), w.codebook + (size_t)code * image.stride,
                image.stride * sizeof(float));
  }
  image = Painter().run(std::move(image), w.op, w.ops);
  const int side = w.patch, width = image.width * side;
  pixels.resize((size_t)image.height * side * width * 4);
  for (int y = 0; y < image.height * side; y++)
    for (int x = 0; x < width; x++) {
      const float* from = image.at(y / side, x / side);
      uint8_t* to = &pixels[((size_t)y * width + x) * 4];
      for (int c = 0; c < 3; c++) {
        const float level = (from[(c * side + y % side) * side + x % side] + 1) * 127.5f;
        const float whole = w.rounds_down ? std::floor(level) : std::nearbyint(level);
        to[c] = (uint8_t)std::min(255.0f, std::max(0.0f, whole));
      }
      to[3] = 255;
    }
  return pixels.data();
}

EXPORT(size_of_world) int size_of_world() { return sizeof(World); }
