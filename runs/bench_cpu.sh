#!/usr/bin/env bash
# Regenerates speed.md on this machine's CPU: raster, diagonals and Hugging Face, then what lower
# precision costs in quality (given held-out token shards). Leave the machine alone.
#   runs/bench_cpu.sh [FOLDER [SHARDS]]      # FOLDER: docs/results by default
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-docs/results}
results=$out/bench_cpu.jsonl
: > "$results.partial"
run() { diagd bench "$@" --json >> "$results.partial"; }
run --model mc-ar-42m -k 1 2 4 --dtype float32 bfloat16 --backend native eager --context-frames 1
run --model mc-ar-42m -k 1 2 4 --dtype int8 --baseline none --context-frames 1
run --model doom -k 1 2 4 --dtype float32 bfloat16 --baseline none
run --model mc-ar-300m --grid 1x14x24 -k 1 2 --dtype float32 bfloat16 --repeats 1 \
  --context-frames 1
mv "$results.partial" "$results"
if [ $# -gt 1 ]; then python runs/precision.py --tokens "$2" --out "$out"; fi
python runs/speed_report.py --results "$out"
