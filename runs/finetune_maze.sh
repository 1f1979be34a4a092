#!/usr/bin/env bash
# Diagonal finetuning of the maze world (paper, section 3.3), 1,000 steps for k=1 and for k=2, and
# what it closes of the teacher-forced gap on held-out clips. Needs the token shards of runs/maze.sh:
# tokens/train and tokens/heldout below the folder given. Runs go on where they were killed. An hour
# and a half on two cores that do nothing else, two thirds of it finetuning.
set -euo pipefail
cd "$(dirname "$0")/.."
work=${1:-work/maze}
results=$work/finetune
out=docs/results/finetune
train=${2:-$work/tokens/train}
tune() {
  diagd tune --tokens "$work/tokens/heldout" --baseline maze --clips 24 -k 1 2 4 \
    --row-start temporal --by frame row column "$@"
}
tune --model maze --out "$results/maze"
for lag in 1 2; do
  diagd finetune --init maze --tokens "$train" --validation "$work/tokens/heldout" \
    --out "$work/maze-k$lag" --strategy "k=$lag" --frames 8 --batch-size 1 \
    --steps 1000 --optimizer adamw --learning-rate 1e-4 --warmup-steps 20
  tune --model "$work/maze-k$lag" --out "$results/maze-k$lag"
done
python runs/finetune_report.py --results "$results"
python runs/gap_study.py --tokens "$work/tokens/heldout" --out "$results" --clips 8 --frames 6
tune --model maze --clips 8 --frames 6 -k 1 2 --overlap --row-start temporal predecessor spatial \
  --out "$results/overlap"
mkdir -p "$out"
cp "$results/finetune.md" "$results/gap_study.md" "$results/maze/tune_column.png" "$out/"
