#!/usr/bin/env bash
# Diagonal finetuning of the bundled model (paper, section 3.3), 1,000 steps for k=1 and for k=2, and
# what it closes of the teacher-forced gap on held-out clips. Needs the token shards of runs/doom.sh:
# tokens/train and tokens/heldout below the folder given. Runs go on where they were killed. An hour
# and a half on two cores that do nothing else, two thirds of it finetuning.
set -euo pipefail
cd "$(dirname "$0")/.."
work=${1:-work/doom}
results=docs/results/finetune
train=${2:-$work/tokens/train}
tune() {
  diagd tune --tokens "$work/tokens/heldout" --baseline doom --clips 24 -k 1 2 4 \
    --row-start temporal --by frame row column "$@"
}
tune --model doom --out "$results/doom"
for lag in 1 2; do
  diagd finetune --init doom --tokens "$train" --validation "$work/tokens/heldout" \
    --out "$work/doom-k$lag" --strategies "k=$lag" --frames 8 --batch-size 1 \
    --steps 1000 --optimizer adamw --learning-rate 1e-4 --warmup-steps 20
  tune --model "$work/doom-k$lag" --out "$results/doom-k$lag"
  cp "$work/doom-k$lag/log.jsonl" "$work/doom-k$lag/loss.png" "$results/doom-k$lag/"
done
python runs/finetune_report.py --results "$results"
python runs/gap_study.py --tokens "$work/tokens/heldout" --out "$results" --clips 8 --frames 6
tune --model doom --clips 8 --frames 6 -k 1 2 --overlap --row-start temporal predecessor spatial \
  --out "$results/overlap"
