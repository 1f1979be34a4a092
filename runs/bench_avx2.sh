#!/usr/bin/env bash
# Regenerates docs/results/avx2: the benchmarks as a processor with AVX2 and no more runs them. Our
# kernels are built for it by the compiler at hand, and PyTorch is limited to the same instructions.
# Leave the machine alone.
#   runs/bench_avx2.sh [FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-docs/results/avx2}
export ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
export DIAGD_CXXFLAGS=-march=x86-64-v3
mkdir -p "$out"
results=$out/bench_avx2.jsonl
: > "$results.partial"
run() { diagd bench "$@" --json >> "$results.partial"; }
run --model doom -k 1 2 --backend native eager --baseline none
run --model doom -k 1 2 --dtype bfloat16 int8 --baseline none
run --model mc-ar-42m -k 1 2 --backend native eager --context-frames 1
run --model mc-ar-42m -k 1 2 --dtype bfloat16 int8 --baseline none --context-frames 1
mv "$results.partial" "$results"
python runs/speed_report.py --results "$out"
