#!/usr/bin/env bash
# The maze world, finetuned for k=1 in 400 steps, judged by published weights beside the others of
# docs/results/study.md. Every part goes on where it was killed. An hour on two quiet cores.
#   runs/true_weights_finetuned.sh [FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
work=${1:-work/finetuned}
maze=diagd/assets/maze
diagd record --scenario my_way_home --out "$work/train" --clips 1024
diagd record --scenario my_way_home --out "$work/heldout" --clips 64 --first-seed 2000000
diagd record --scenario my_way_home --out "$work/real" --clips 128 --first-seed 1000000
diagd tokenize --clips "$work/train" --heldout "$work/heldout" --out "$work/tokens" \
  --tokenizer $maze/tokenizer --actions $maze/actions.json
diagd finetune --init maze --tokens "$work/tokens" --out "$work/maze-k1" --strategy k=1 \
  --frames 8 --batch-size 1 --steps 400 --optimizer adamw --learning-rate 1e-4 --warmup-steps 20
python runs/true_weights.py --clips "$work/real" --out "$work/weights" \
  --models finetuned="$work/maze-k1" --strategy k=1 k=2 k=4 k=1,d=14
cp "$work/weights/true_weights.json" docs/results/weights/my_way_home_finetuned.json
cp "$work/weights/true_weights.md" docs/results/weights/my_way_home_finetuned.md
