#!/usr/bin/env bash
# Does a larger model lose less? mc-ar-doom-small, trained like the maze world with half the steps,
# beside it: the teacher-forced gap, and 64 generated clips. Needs what runs/maze.sh makes, in the folder
# given. Runs go on where they were killed. An hour on one core.
set -euo pipefail
cd "$(dirname "$0")/.."
work=${1:-work/maze}
tokens=${2:-$work/tokens}
results=docs/results/sizes
mkdir -p "$results"
train() {
  diagd train --model mc-ar-doom-small --tokens "$tokens" "$@"
}
train --out "$work/small1" --frames 4 --batch-size 4 --steps 1500 --hold 0.2
train --out "$work/small" --init "$work/small1" --frames 8 --batch-size 2 --steps 1200 \
  --learning-rate 1.5e-3 --hold 0.1
for model in maze "$work/small"; do
  diagd tune --tokens "$tokens" --model "$model" --clips 24 -k 1 2 4 \
    --row-start temporal --by column --out "$work/sizes/tune-$(basename "$model")"
done
cp "$work/sizes/tune-small/tune.json" "$results/"
diagd evaluate --protocol mc-ar --clips "$work/heldout" --num-clips 64 --out "$work/sizes" \
  --models small="$work/small" --strategy "k=4 k=2 k=1"
diagd report --results "$work/sizes" --out "$work/sizes/report" --title "A model of a quarter of the size"
python runs/keep_report.py "$work/sizes/report" "$results"
