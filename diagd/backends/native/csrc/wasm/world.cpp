// A world that plays in a browser: prompts, frames and pictures, on the kernels' own step.
//
// The file of a world is an image of these records, pointers counted from its beginning, and a list
// of where they stand (diagd/backends/native/wasm.py writes it). The plans in it are those of
// diagd/decoding/schedule.py; the stream does as that of diagd/decoding/engine.py.
#include <cstdlib>
#include <limits>
#include <new>

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

extern "C" int take_int8(const Model* m, const Step* s, const Space* space);
extern "C" int decode_int8(const Model* m, const Step* s);
extern "C" void turn_of(const Model* m, const int64_t* coordinates, float* to);

namespace {

constexpr uint32_t MAGIC = 0x64676961, VERSION = 6;  // "aigd"
constexpr int64_t SCRATCH = -((int64_t)1 << 31), NEVER = ((int64_t)1 << 31) - 1;
constexpr int PREFILL_LANES = 256, READ = 64;  // BLOCK of diagd/decoding/step.py

enum { POSITIONS, SLOTS, INPUTS, OUTPUTS, STEPS, FRAMES, ROWS, COLUMNS, TURNS };  // of lanes
enum { LOW = COLUMNS + 1, HIGH };  // of a GPU's
enum Failure { NONE, DAMAGED, OTHER_VERSION, OUT_OF_RANGE, NO_MEMORY, UNDRAWN_TOKEN };

// Of the tasks of a GPU, which stand every 256 bytes.
struct Uniform {
  Task task;
  uint32_t apart[50];
};
struct Submission {
  int32_t steps, lane_words, memory_words, slots, capacity;
  const Uniform* tasks;
  const int32_t* lanes;
  int32_t* memory;
};

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
    const size_t slots = ceil_to(count, BLOCK), heads = m.num_kv_heads;
    const size_t size = heads * slots * (ceil_to(m.head_dim, BLOCK) + 2);
    cache.resize(2 * m.num_layers);
    for (auto& one : cache) one.resize(size), pointers.push_back(one.data());
    tokens.resize(count), held.resize(count), fed_at.resize(count);
    coordinates.resize(m.on_grid ? 3 * count : 0);
    picked.resize(frame_tokens);
  }

  int64_t held_frames = 0, window = 0;

  void begin(const Prompt& prompt_, uint64_t seed_) {
    prompt = &prompt_, seed = seed_, generated = 0, held_frames = prompt->frames, is_read = false;
    std::fill(held.begin(), held.end(), -1);
    for (int i = 0; i < prompt->length; i++) tokens[i] = prompt->tokens[i], held[i] = i;
    used = prompt->length;
    if (m.on_grid) std::copy_n(prompt->coordinates, 3 * used, coordinates.begin());
    prefix = used - (prompt->frames * per_frame - w.action_tokens);
    window = prompt->frames + (w.max_slots - used) / per_frame;
  }

  // Fills the cache with what the context holds, where it has been filled by somebody else.
  Failure read() {
    if (is_read) return NONE;
    plan_context();
    for (size_t i = 0; i < reaches.size(); i++) {
      Step s = step(i);
      ids.resize(s.lanes), logits.resize(ceil_to(m.vocab_size, BLOCK));
      for (int j = 0; j < s.lanes; j++) ids[j] = tokens[lane(INPUTS)[starts[i] + j]];
      s.keep = 1, s.tokens = ids.data(), s.logits = logits.data();
      s.at = lane(POSITIONS) + starts[i], s.slots = lane(SLOTS) + starts[i];
      s.steps = lane(STEPS) + starts[i];
      if (m.on_grid) {
        turns.resize(3 * s.lanes);
        for (int j = 0; j < s.lanes; j++) std::copy_n(turn(starts[i] + j), 3, &turns[3 * j]);
        s.coordinates = turns.data();
      }
      if (const int failed = decode_int8(&m, &s)) return failed == 1 ? OUT_OF_RANGE : NO_MEMORY;
    }
    is_read = true;
    return NONE;
  }

  Failure advance(const int64_t* action, const Plan* plans, float temperature, float top_p) {
    if (const Failure failed = read()) return failed;
    plan_frame(action, plans);
    Drawing drawing = w.drawing;
    drawing.rules.top_k = w.top_k, drawing.rules.exclusive_top_p = w.exclusive_top_p;
    drawing.rules.temperature = temperature, drawing.rules.top_p = top_p;
    Space space{tokens.data(), (int64_t*)&seed, nullptr, num_lanes, num_lanes, &drawing};
    for (size_t i = 0; i < reaches.size(); i++) {
      const Step s = step(i);
      space.lanes = lanes.data() + starts[i];
      if (const int failed = take_int8(&m, &s, &space))
        return failed == 1 ? OUT_OF_RANGE : NO_MEMORY;
    }
    return finish();
  }

  // A frame, as `advance` writes it, for a GPU that has what the context holds.
  const Submission* describe_frame(const int64_t* action, const Plan* plans, float temperature,
                                   float top_p) {
    plan_frame(action, plans);
    return describe(temperature, top_p);
  }
  const Submission* describe_context() {
    plan_context();
    return describe(0, 1);
  }

  // Ends the frame that was described: its tokens stand in the memory of the submission.
  Failure accept() {
    for (int i = w.action_tokens; i < per_frame; i++) {
      const int64_t slot = slot_of(used + i), id = memory[slot];
      if (id >= m.vocab_size) return UNDRAWN_TOKEN;
      tokens[slot] = id;
    }
    is_read = false;
    return finish();
  }

  const int32_t* newest() const { return picked.data(); }

 private:
  int64_t* lane(int field) { return lanes.data() + field * num_lanes; }
  // What the position of a lane turns by: that, or its coordinates.
  const int64_t* turn(int i) {
    const int64_t* at = lane(POSITIONS) + i;
    return m.on_grid ? &coordinates[3 * slot_of(*at)] : at;
  }

  // A frame as lanes, and which of them each step feeds.
  void plan_frame(const int64_t* action, const Plan* plans) {
    const Plan& plan = plans[std::min<int64_t>(held_frames, 2) - 1];
    for (int i = 0; i < count; i++) fed_at[i] = held[i] >= 0 && held[i] < used ? -1 : NEVER;
    for (int i = 0; i < per_frame; i++) {
      const int64_t slot = slot_of(used + i);
      held[slot] = used + i, fed_at[slot] = plan.fed_at[i];
      if (i < w.action_tokens) tokens[slot] = action[i];
      if (m.on_grid)
        for (int axis = 0; axis < 3; axis++)
          coordinates[3 * slot + axis] =
              prompt->coordinates[3 * (prompt->length + i) + axis] + generated * w.further[axis];
    }
    num_lanes = plan.lanes;
    lanes.assign(plan.packed, plan.packed + TURNS * num_lanes);
    if (m.on_grid) lanes.resize((TURNS + 3) * num_lanes);
    for (int i = 0; i < num_lanes; i++) {
      lane(POSITIONS)[i] += used, lane(FRAMES)[i] += generated;
      for (const int field : {SLOTS, INPUTS, OUTPUTS}) {
        int64_t& slot = lane(field)[i];
        slot = slot == SCRATCH ? scratch : slot_of(used + slot);
      }
      if (m.on_grid)
        for (int axis = 0; axis < 3; axis++) lane(TURNS + axis)[i] = turn(i)[axis];
    }
    starts.assign(plan.starts, plan.starts + plan.steps + 1);
    reaches.clear();
    for (int i = 0; i < plan.steps; i++) {
      const int64_t end = std::min<int64_t>(used + plan.ends[i], scratch);
      reaches.push_back(std::min<int64_t>((end + READ - 1) / READ * READ, count));
    }
  }

  // What the context holds, in raster order, but its newest token: a frame begins with that.
  void plan_context() {
    std::vector<int64_t> positions;
    for (int64_t at = 0; at < used - 1; at++) {
      if (at == prefix) at = std::max(at, used - window * per_frame);
      if (held[slot_of(at)] == at) positions.push_back(at);
    }
    for (int i = 0; i < count; i++) fed_at[i] = held[i] >= 0 && held[i] < used ? held[i] : NEVER;
    num_lanes = positions.size();
    lanes.assign(TURNS * num_lanes, 0);
    starts.assign(1, 0), reaches.clear();
    for (int i = 0, reach = 0; i < num_lanes; i++) {
      const int64_t slot = slot_of(positions[i]);
      lane(POSITIONS)[i] = lane(STEPS)[i] = positions[i];
      lane(SLOTS)[i] = lane(INPUTS)[i] = slot, lane(OUTPUTS)[i] = scratch;
      reach = std::max<int>(reach, slot + 1);
      if (i + 1 < num_lanes && (i + 1) % PREFILL_LANES) continue;
      starts.push_back(i + 1), reaches.push_back(reach);
    }
  }

  const Submission* describe(float temperature, float top_p) {
    const int size = HIGH + 1 + m.head_dim;
    told.resize((size_t)num_lanes * size);
    for (int i = 0; i < num_lanes; i++) {
      int32_t* to = &told[(size_t)i * size];
      for (int field = POSITIONS; field <= COLUMNS; field++) to[field] = lane(field)[i];
      const int64_t* bounds = w.drawing.by_place;
      if (bounds) bounds += 2 * (lane(ROWS)[i] * w.width + lane(COLUMNS)[i]);
      to[LOW] = bounds ? bounds[0] : w.drawing.low, to[HIGH] = bounds ? bounds[1] : w.drawing.high;
      turn_of(&m, turn(i), (float*)(to + HIGH + 1));
    }
    memory.assign(tokens.begin(), tokens.end());
    memory.insert(memory.end(), held.begin(), held.end());
    memory.insert(memory.end(), fed_at.begin(), fed_at.end());
    for (const int half : {0, 32}) memory.push_back((int32_t)(uint32_t)(seed >> half));
    uint32_t capacity = 0;
    tasks.clear();
    for (size_t i = 0; i < reaches.size(); i++) {
      const uint32_t n = starts[i + 1] - starts[i], slots = count;
      capacity = std::max(capacity, n);
      tasks.push_back({n, n, n, (uint32_t)reaches[i], slots, slots, slots,
                       (uint32_t)(starts[i] * size), 0, 0, (uint32_t)w.top_k,
                       (uint32_t)w.exclusive_top_p, temperature, top_p});
    }
    for (Uniform& one : tasks) one.task.capacity = capacity;
    submission = {(int32_t)tasks.size(),
                  (int32_t)told.size(),
                  (int32_t)memory.size(),
                  count,
                  (int32_t)capacity,
                  tasks.data(),
                  told.data(),
                  memory.data()};
    return &submission;
  }

  Failure finish() {
    for (int i = 0; i < frame_tokens; i++) {
      picked[i] = tokens[slot_of(used + w.action_tokens + i)];
      if (picked[i] < 0) return UNDRAWN_TOKEN;
    }
    used += per_frame, generated++;
    held_frames = std::min(held_frames + 1, window);
    return NONE;
  }

  Step step(size_t i) {
    Step s{};
    s.sequences = s.cached = 1, s.num_slots = s.held_stride = count, s.threads = team.threads;
    s.keys = pointers.data(), s.values = pointers.data() + m.num_layers;
    s.held = held.data(), s.fed_at = fed_at.data();
    s.lanes = starts[i + 1] - starts[i], s.visible_slots = reaches[i];
    return s;
  }

  int64_t slot_of(int64_t position) const {
    const int64_t behind = position - prefix;
    return behind < 0 ? position : prefix + behind % (window * per_frame);
  }

  const World& w;
  const Model& m;
  const Prompt* prompt = nullptr;
  int frame_tokens, per_frame, count, num_lanes = 0;
  int64_t scratch, used = 0, prefix = 0, generated = 0;
  uint64_t seed = 0;
  bool is_read = false;  // whether the cache has what the context holds
  std::vector<std::vector<int16_t>> cache;
  std::vector<void*> pointers;
  std::vector<int64_t> tokens, held, fed_at, ids;
  std::vector<int64_t> lanes, turns;  // (8 or 11, num_lanes), (lanes of a step, 3)
  std::vector<int64_t> coordinates;  // (count, 3) of what the slots hold
  std::vector<int32_t> picked, starts, reaches, told, memory;
  std::vector<float> logits;
  std::vector<Uniform> tasks;
  Submission submission{};
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

// Takes the file of a world, which stays where it is: 4 bytes a pointer behind `size`.
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
  stream->begin(world->prompt[prompt], seed);
  return NONE;
}

static bool has_frame(int action, int strategy) {
  return action >= 0 && action < world->actions && strategy >= 0 && strategy < world->strategies;
}

EXPORT(read_context) int read_context() { return stream->read(); }
EXPORT(advance) int advance(int action, int strategy, float temperature, float top_p) {
  if (!has_frame(action, strategy)) return OUT_OF_RANGE;
  return stream->advance(world->action + action * world->action_tokens, world->plan + 2 * strategy,
                         temperature, top_p);
}

// The same with a GPU, which is told what stands in a `Submission`: first the context, wherever it
// has not written the frame before; then a frame, and its tokens are accepted.
EXPORT(describe_context) const Submission* describe_context() { return stream->describe_context(); }
EXPORT(describe_frame)
const Submission* describe_frame(int action, int strategy, float temperature, float top_p) {
  if (!has_frame(action, strategy)) return nullptr;
  return stream->describe_frame(world->action + action * world->action_tokens,
                                world->plan + 2 * strategy, temperature, top_p);
}
EXPORT(accept_frame) int accept_frame() { return stream->accept(); }

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

// The records of the file, for Python to compare.
EXPORT(records_of_worlds) const char* records_of_worlds() {
  return describe_all<Layer, Model, Draw, Drawing, Prompt, Plan, Op, World, Task>();
}
