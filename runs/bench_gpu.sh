#!/usr/bin/env bash
# Regenerates docs/results/bench_gpu.jsonl on a CUDA device. Not run yet: no GPU was at hand.
set -euo pipefail
cd "$(dirname "$0")/.."
results=docs/results/bench_gpu.jsonl
: > "$results.partial"
run() { diagd bench --device cuda --dtype bfloat16 "$@" --json >> "$results.partial"; }
run --model mc-ar-300m --grid 4x14x24 -k 1 2 4
run --model mc-ar-1.2b --grid 2x14x24 -k 1 2 4
run --model wham-1.6b --grid 2x18x30 -k 1 2 4 --baseline none
run --model cosmos-4b --grid 3x40x64 --context-frames 2 --overlap -k 1 2 --baseline none
run --model cosmos-12b --grid 3x40x64 --context-frames 2 --overlap -k 1 --baseline none
mv "$results.partial" "$results"
python runs/speed_report.py --results docs/results
