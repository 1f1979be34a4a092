#!/usr/bin/env bash
# Exact decoding measured: time by lanes in two dtypes, token equality on 64 clips, rivals, and speed
# against quality. Leave the machine alone. Goes on where it was killed. An hour on two cores.
#   runs/exact.sh CLIPS      # CLIPS: heldout of runs/maze.sh
set -euo pipefail
cd "$(dirname "$0")/.."
clips=${1:?folder of held-out clips, as runs/maze.sh records them}
work=${EXACT_WORK:-work/exact}
results=docs/results/exact
lanes="exact exact,lanes=8 exact,lanes=16 exact,lanes=24 exact,lanes=32 exact,lanes=40 exact,lanes=96"
for dtype in float32 bfloat16; do
  python runs/exact.py --clips "$clips" --out "$work" --num-clips 4 --frames 8 --dtype "$dtype" \
    --strategy "k=1 k=2 $lanes"
done
python runs/exact.py --clips "$clips" --out "$work/64_clips" --interactive --strategy exact,lanes=32
python runs/exact.py --clips "$clips" --out "$work/rivals" --num-clips 4 --frames 4
diagd evaluate --models maze --clips "$clips" --num-clips 24 --context-frames 4 --frames 12 --out "$work/quality" --strategy \
  "k=1 k=2 exact exact,lanes=32 jacobi,lanes=96 zipar=4"
diagd report --results "$work/quality" --out "$work/report" --examples 0 \
  --title "Exact decoding and its rivals: speed and quality"
python runs/keep_report.py "$work/report" "$results" frontier
cp "$work/exact.json" "$work/exact_bfloat16.json" "$results/"
cp "$work/64_clips/exact.json" "$results/exact_64_clips.json"
cp "$work/rivals/exact.json" "$results/exact_rivals.json"
