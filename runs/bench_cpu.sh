#!/usr/bin/env bash
# Regenerates docs/results/bench_cpu.jsonl: raster, diagonals and Hugging Face on this machine's CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
results=docs/results/bench_cpu.jsonl
: > "$results.partial"
run() { diagd bench "$@" --json | tee /dev/stderr | tail -n 1 >> "$results.partial"; }
run --model mc-ar-42m --grid 2x14x24 --row-lag 1 2 4 --repeats 2
run --model mc-ar-42m --grid 2x14x24 --row-lag 1 2 4 --repeats 2 --dtype bfloat16
run --model doom --grid 2x14x24 --row-lag 1 2 4
mv "$results.partial" "$results"
