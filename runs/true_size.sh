#!/usr/bin/env bash
# Cosmos-4B at its true size (random weights, bfloat16) on a CPU with 24 GB: 24 frames (3 grids of 40x64
# tokens) after 9 (2 grids), d = k x 40. A sample of the steps of each run stands for all of them.
set -euo pipefail
cd "$(dirname "$0")/.."
results=docs/results/true_size_cpu.jsonl
diagd bench --model cosmos-4b --dtype bfloat16 --grid 3x40x64 --context-frames 2 --overlap \
  -k 1 2 --steps "${STEPS:-16}" --repeats 1 --baseline none --json > "$results.partial"
mv "$results.partial" "$results"
