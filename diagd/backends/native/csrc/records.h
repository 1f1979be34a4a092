// What the Python side hands over: diagd/backends/native/boundary.py.
#pragma once
#include "team.h"

extern "C" {
struct LayerWeights {
  const void *qkv, *out, *gate_up, *down;
  const float *qkv_bias, *out_bias, *gate_up_bias, *down_bias;
  const float *qkv_scale, *out_scale, *gate_up_scale, *down_scale;
  const float *norm1, *norm1_bias, *norm2, *norm2_bias;
  const float *q_norm, *q_norm_bias, *k_norm, *k_norm_bias;  // with biases: LayerNorms by head
  int64_t slides;  // whether it sees the last `sliding_window` positions only
};
struct Model {
  int32_t hidden, intermediate, layers, heads, kv_heads, head_dim, vocab, rms, gated;
  int32_t num_embeddings, max_positions;
  int32_t prefix, actions, grid_width, grid_tokens;  // of (frame, row, column); width 0: positions
  int32_t head_size;       // of a layer before the output layer, or 0
  int32_t sliding_window;  // 0: no layer slides
  int32_t two_digits;      // activations between int8 weights: integers.h
  float eps;
  const void *embeddings, *head;
  const float* positions;     // learned ones, or null
  const double* frequencies;  // radians a pair of a head turns for each coordinate, or null
  const int64_t* axes;        // which coordinate that is
  const float *norm, *norm_bias, *head_scale, *head_bias;
  const void* head_proj;
  const float *head_proj_scale, *head_proj_bias;
  const LayerWeights* weights;
};
struct Step {
  int32_t batch, lanes, visible_slots, num_slots;
  int32_t keep, threads;                                 // keep: logits of the last so many lanes
  const int64_t *tokens, *at, *slots;                    // (B, L), (L,), (L,)
  const uint8_t* visible;                                // (L, visible_slots), unless there are
  const int64_t *steps, *held, *fed_at;                  // (L,), (visible_slots,) twice: the rule
  void *const *keys, *const *values;                     // a pair of buffers a layer, written to
  int64_t* written;                                      // (num_slots,): the position at each slot
  float* logits;                                         // (B, keep, vocab rounded up to blocks)
  double* seconds;                                       // by `Part`, added to; null: untimed
};
struct Draw {
  int32_t batch, lanes, vocab;
  int32_t stride, threads;                  // stride: floats from one lane's logits to the next
  int32_t top_k, exclusive_top_p;           // 0 keeps all; the id that crosses top_p goes, too
  float temperature, top_p;                 // 0 is greedy; 1 keeps all
  const float* logits;                      // (B, L, stride)
  const int64_t *low, *high;                // (L,) valid ids of each lane
  const int64_t *seeds;                     // (B,)
  const int64_t *frames, *rows, *columns;   // (L,)
  int64_t* drawn;                           // (B, L); UNDRAWN where there is no best
  double* seconds;                          // by `Part`, added to; null: untimed
};
struct Space {                              // what a whole step reads and writes beside the cache
  int32_t slots, height, width;             // scratch included; of a frame
  int64_t low, high;                        // valid ids, unless there are
  const int64_t* by_place;                  // (height, width, 2), or null
  int64_t* tokens;                          // (B, slots)
  const int64_t* lanes;                     // (8, L), `stride` from one field to the next
  int64_t stride;
};
}

enum Part { LINEARS, ATTENTION, REST, DRAWING };  // norms and activations count as linears

// Adds what passed since the last call to the seconds of a part, if there are any.
struct Lap {
  double* seconds;
  Clock::time_point since = Clock::now();
  explicit Lap(double* to) : seconds(to) {}
  void operator()(Part part) {
    if (!seconds) return;
    const auto now = Clock::now();
    seconds[part] += std::chrono::duration<double>(now - since).count();
    since = now;
  }
};
