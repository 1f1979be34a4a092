// The records of a world's file, and of a GPU: diagd/backends/native/wasm.py reads them here.
#pragma once
#include "../records.h"

// clang-format off: Python reads these lines as they stand
RECORD(Op,
  int32_t kind, input, output, size;  // channels; size: of a kernel's side, or groups of a norm
  float eps;
  const void *weight;  // matrices in blocks, one for each place of the kernel; or numbers of a norm
  const float *bias, *scale;
)

RECORD(Prompt,
  int32_t length, frames;  // tokens, and frames that they end with
  const int64_t *tokens;
  const int64_t *coordinates;  // (length + a frame, 3) of it and of the frame behind it, or null
)

RECORD(Plan,  // DecodePlan: SCRATCH for the scratch slot
  int32_t steps, lanes;
  const int64_t *packed;  // (8, lanes)
  const int32_t *starts, *ends;
  const int64_t *fed_at;
)

RECORD(World,
  uint32_t magic, version, size, checksum;  // size: of the records and what they point to
  int32_t prompts, actions, strategies;     // how many there are
  int32_t action_tokens, height, width;     // before a frame, and of one
  int32_t max_slots, top_k, exclusive_top_p, ops;
  int32_t patch, rounds_down;  // pixels of a token's side
  Drawing drawing;             // but for its rules, which are told with each frame
  Model model;
  const Prompt *prompt;
  const int64_t *further;  // (3,) coordinates of a frame beyond those of the one before, or null
  const int64_t *action;  // (actions, action_tokens)
  const Plan *plan;       // (strategies, 2): one frame of context, and more
  const float *codebook;  // (codes, channels rounded up to blocks)
  int32_t codes, channels;
  const Op *op;
)

// What a GPU is told (diagd/backends/webgpu/decoder.wgsl): its `Step` every 256 bytes, its lanes,
// and its memory, which begins with the tokens.
RECORD(Task,
  uint32_t lanes, rows, keep, reach, slots, stride, held, first, mask, capacity;
  uint32_t top_k, exclusive_top_p;
  float temperature, top_p;
)
