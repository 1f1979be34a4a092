// Loads a library of the kernels and runs them, where there is no Python: test_foreign.py.
//
//   smoke LIBRARY
//
// A random model reads twelve tokens one by one, then three, eight and one at a time, on one thread
// and on three, also of callers that end. Exit code 0: all logits are the same bits. They are
// printed.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "../../../diagd/backends/native/csrc/decoder.cpp"  // for its records
#ifdef _WIN32
#include <windows.h>
void* find(const char* library, const char* name) {
  const HMODULE loaded = LoadLibraryA(library);
  return loaded ? (void*)GetProcAddress(loaded, name) : nullptr;
}
#else
#include <dlfcn.h>
void* find(const char* library, const char* name) {
  void* loaded = dlopen(library, RTLD_NOW);
  return loaded ? dlsym(loaded, name) : nullptr;
}
#endif

constexpr int HIDDEN = 64, INNER = 96, LAYERS = 2, HEADS = 4, KV_HEADS = 2, HEAD = 16, VOCAB = 96;
constexpr int TOKENS = 12, SLOTS = 32, WINDOW = 5;  // of positions, in the last layer

uint32_t state = 1;
float number() {  // in [-1, 1)
  state = state * 1664525u + 1013904223u;
  return (int32_t)state * 0x1p-31f;
}

std::vector<std::vector<float>> kept;
const float* floats(int count, float scale, float offset = 0) {
  kept.emplace_back(count);
  for (float& value : kept.back()) value = offset + scale * number();
  return kept.back().data();
}

int library_block;  // columns of a block, of which there are more where registers are wider

// Weights of `columns` outputs, the same in every library: in blocks of its own, or of one column.
template <class W>
const void* blocks(int columns, int K, int block = library_block) {
  constexpr int packed = PACKED<W>;
  const int rows = FIRST_ROWS<W> + (packed == 4 ? ceil_to(K, 64) : K) / packed;
  const float* values = floats(columns * rows * packed, 0.2f);
  kept.emplace_back(columns * rows * packed);
  void* to = kept.back().data();
  for (int column = 0; column < columns; column++)
    for (int i = 0; i < rows * packed; i++) {
      const int row = column / block * rows + i / packed;
      const int at = (row * block + column % block) * packed + i % packed;
      const float value = values[column * rows * packed + i];
      if constexpr (packed == 1)
        ((float*)to)[at] = value;
      else if constexpr (packed == 2)
        put((bf16*)to + at, value);
      else
        ((int8_t*)to)[at] = (int8_t)(value * 600);
    }
  return to;
}

template <class W>
int check(int (*decode)(const Model*, const Step*), const char* name, int two_digits = 0) {
  state = 1;
  const int qkv = (HEADS + 2 * KV_HEADS) * HEAD;
  Layer layers[LAYERS];
  const auto scale = [](int columns) {
    return PACKED<W> == 4 ? floats(columns, 0, 0.002f) : nullptr;
  };
  for (Layer& layer : layers)
    layer = {blocks<W>(qkv, HIDDEN),
             blocks<W>(HIDDEN, HEADS * HEAD),
             blocks<W>(2 * INNER, HIDDEN),
             blocks<W>(HIDDEN, INNER),
             floats(qkv, 0.1f),
             floats(HIDDEN, 0.1f),
             floats(2 * INNER, 0.1f),
             nullptr,
             scale(qkv),
             scale(HIDDEN),
             scale(2 * INNER),
             scale(HIDDEN),
             floats(HIDDEN, 0.1f, 1),
             nullptr,
             floats(HIDDEN, 0.1f, 1),
             nullptr,
             floats(HEADS * HEAD, 0.1f, 1),
             floats(HEADS * HEAD, 0.1f),
             floats(KV_HEADS * HEAD, 0.1f, 1),
             floats(KV_HEADS * HEAD, 0.1f)};
  const double frequencies[HEAD / 2] = {1, 0.5, 0.25, 0.1, 0.05, 0.02, 0.01, 0.001};
  const int64_t axes[HEAD / 2] = {};
  Model model{HIDDEN,
              INNER,
              LAYERS,
              HEADS,
              KV_HEADS,
              HEAD,
              VOCAB,
              1,
              1,
              VOCAB,
              64,
              0,
              INNER,
              WINDOW,
              two_digits,
              1e-5f,
              floats(VOCAB * HIDDEN, 1),
              blocks<W>(VOCAB, INNER),
              nullptr,
              frequencies,
              axes,
              floats(HIDDEN, 0.1f, 1),
              nullptr,
              scale(VOCAB),
              floats(VOCAB, 0.1f),
              blocks<W>(INNER, HIDDEN),
              scale(INNER),
              floats(INNER, 0.1f),
              layers};
  layers[LAYERS - 1].slides = 1;
  if (PACKED<W> > 1) model.embeddings = blocks<Pair>(VOCAB, HIDDEN, 1);

  const auto feed = [&](std::vector<int> widths, int threads) {
    // keys or values of heads that are whole blocks, and a scale for each slot
    const int size = KV_HEADS * SLOTS * (ceil_to(HEAD, library_block) + 1);
    std::vector<std::vector<float>> memory(2 * LAYERS, std::vector<float>(size));
    void* buffers[2 * LAYERS];
    for (int i = 0; i < 2 * LAYERS; i++) buffers[i] = memory[i].data();
    std::vector<float> logits(TOKENS * VOCAB);
    int64_t tokens[TOKENS], places[SLOTS];
    for (int i = 0; i < TOKENS; i++) tokens[i] = i * 7 % VOCAB;
    for (int i = 0; i < SLOTS; i++) places[i] = i;
    for (int at = 0, turn = 0; at < TOKENS; at += widths[turn++ % widths.size()]) {
      const int lanes = widths[turn % widths.size()], seen = at + lanes;
      std::vector<uint8_t> visible(lanes * seen);
      for (int lane = 0; lane < lanes; lane++)
        for (int slot = 0; slot <= at + lane; slot++) visible[lane * seen + slot] = 1;
      const Step step{1,
                      lanes,
                      seen,
                      SLOTS,
                      0,
                      1,
                      lanes,
                      threads,
                      SLOTS,
                      tokens + at,
                      places + at,
                      places + at,
                      nullptr,
                      visible.data(),
                      nullptr,
                      places,
                      nullptr,
                      buffers,
                      buffers + LAYERS,
                      logits.data() + at * VOCAB,
                      nullptr};
      if (decode(&model, &step)) std::exit(3);
    }
    return logits;
  };
  const std::vector<float> alone = feed({1}, 1);
  for (float logit : alone) {
    if (!std::isfinite(logit)) return 4;
    std::printf("%s %.9g\n", name, logit);
  }
  const auto same = [&](int threads) {
    const std::vector<float> together = feed({3, 8, 1}, threads);
    return !std::memcmp(alone.data(), together.data(), alone.size() * sizeof(float));
  };
  int different = !same(1) + !same(3);
  for (int i = 0; i < 3; i++) std::thread([&] { different += !same(3); }).join();
  return different ? 5 : 0;
}

int main(int, char** arguments) {
  const auto function = [&](const char* name) {
    void* found = find(arguments[1], name);
    if (!found) std::exit(2);
    return found;
  };
  const auto decoder = [&](const char* name) {
    return (int (*)(const Model*, const Step*))function(name);
  };
  library_block = ((int (*)())function("block_columns"))();
  const int f32 = check<float>(decoder("decode_f32"), "f32");
  const int bf16s = check<Pair>(decoder("decode_bf16"), "bf16");
  const int int8 = check<Quad>(decoder("decode_int8"), "int8");
  const int two_digits = check<Quad>(decoder("decode_int8"), "int8-two-digits", 1);
  return f32 ? f32 : bf16s ? bf16s : int8 ? int8 : two_digits;
}
