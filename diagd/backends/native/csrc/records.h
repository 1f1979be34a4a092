// What the Python side hands over: diagd/backends/native/boundary.py makes the same of these lines.
#pragma once
#include "record.h"
#include "simd.h"

// clang-format off: Python reads these lines as they stand
RECORD(Layer,
  const void *qkv, *out, *gate_up, *down;
  const float *qkv_bias, *out_bias, *gate_up_bias, *down_bias;
  const float *qkv_scale, *out_scale, *gate_up_scale, *down_scale;
  // the second MLP's, which tokens with an output row take, or null
  const void *visual_gate_up, *visual_down;
  const float *visual_gate_up_bias, *visual_down_bias, *visual_gate_up_scale, *visual_down_scale;
  const float *norm1, *norm1_bias, *norm2, *norm2_bias;
  const float *post1, *post1_bias, *post2, *post2_bias;  // post-norms, or null
  const float *q_norm, *q_norm_bias, *k_norm, *k_norm_bias;  // with biases: LayerNorms by head
  int64_t slides;  // whether it sees the last `sliding_window` positions only
)

RECORD(Model,
  int32_t hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim;
  int32_t vocab_size, rms, gated;
  int32_t num_embeddings, max_positions;
  int32_t on_grid;         // whether lanes have coordinates; else they turn by their positions
  int32_t head_size;       // of a layer before the output layer, or 0
  int32_t sliding_window;  // 0: no layer slides
  int32_t two_digits;      // activations between int8 weights: integers.h
  float norm_eps;
  const void *embeddings, *head;
  const float *positions;     // learned ones, or null
  const double *frequencies;  // radians a pair of a head turns for each coordinate, or null
  const int64_t *axes;        // which coordinate that is
  const float *norm, *norm_bias, *head_scale, *head_bias;
  const void *head_proj;
  const float *head_proj_scale, *head_proj_bias;
  const Layer *weights;
)

RECORD(Step,
  int32_t sequences, lanes, visible_slots, num_slots;    // S', L and M; the last slot is scratch
  int32_t first, cached;                                 // of the `cached` sequences of the cache
  int32_t keep, threads;                                 // keep: logits of the last so many lanes;
                                                         // 0: of all that are no padding, packed
  int64_t held_stride;                                   // from one sequence's to the next
  const int64_t *tokens, *at, *slots;                    // (S', L); at the scratch slot: padding
  const int64_t *coordinates;                            // (S', L, 3), or null: the positions `at`
  const uint8_t *visible;                                // (S', L, M), or null, and then the rule
  const int64_t *steps, *held, *fed_at;                  // (S', L), (S', M) twice
  void **keys, **values;                                 // a pair of buffers a layer, written to
  float *logits;                                         // (S', keep, vocab rounded up to blocks)
  double *seconds;                                       // by `Part`, added to; null: untimed
)

RECORD(Draw,
  int32_t count, vocab;
  int32_t stride, threads;                  // stride: floats from one place's logits to the next
  int32_t top_k, exclusive_top_p;           // 0 keeps all; the id that crosses top_p goes, too
  float temperature, top_p;                 // 0 is greedy; 1 keeps all
  const float *logits;                      // (count, stride)
  const int64_t *low, *high;                // (count,) valid ids of each place
  const int64_t *seeds;                     // (count,)
  const int64_t *frames, *rows, *columns;   // (count,)
  int64_t *drawn;                           // (count,); UNDRAWN where there is no best
  double *seconds;                          // by `Part`, added to; null: untimed
)

RECORD(Drawing,                             // how neighbouring sequences are drawn
  Draw rules;                               // of which places are told in a step
  int32_t sequences, height, width;         // so many; of a frame
  int64_t low, high;                        // valid ids, unless there are
  const int64_t *by_place;                  // (height, width, 2), or null
)

RECORD(Space,                               // what a whole step reads and writes beside the cache
  int64_t *tokens;                          // (cached sequences, slots)
  const int64_t *seeds;                     // (cached sequences,)
  const int64_t *lanes;                     // (8, S', L), or with coordinates (11, S', L)
  int64_t field_stride, sequence_stride;    // from one field, and sequence, to the next
  const Drawing *drawings;                  // of all sequences, in order
)

// What attention is handed in training.
RECORD(Attended,
  int32_t batch, heads, kv_heads, lanes, head_dim, threads;
  float scale;
  const uint8_t *visible, *seen_by;  // (lanes, lanes): query by key, and key by query
  const uint8_t *blocks;             // for 32 queries by 32 keys: 0 none, 1 some, 2 all of them
  // (batch, lanes, heads, head_dim), contiguous; keys and values have kv_heads
  const bf16 *queries, *keys, *values, *out, *out_grad;
  bf16 *to, *queries_grad, *keys_grad, *values_grad;
  float *masses;  // (batch, heads, lanes): logarithms to the base of 2 of the softmax's sums
)
