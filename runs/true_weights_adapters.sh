#!/usr/bin/env bash
# The maze world with an adapter of rank 16, and finetuned whole for as many steps, judged by
# published weights beside the others of docs/results/study.md. After `runs/adapters.sh maze TOKENS
# 90 --clips 24`; goes on where it was killed. Half an hour on a core.
#   runs/true_weights_adapters.sh [FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
work=${1:-work/weights_adapters} arms=work/adapters/maze/adapters
diagd record --scenario my_way_home --out "$work/real" --clips 128 --first-seed 1000000
if [ ! -d "$work/rank16" ]; then
  diagd convert diagd/assets/maze "$work/rank16" --adapter $arms/rank16-200-0
fi
python runs/true_weights.py --clips "$work/real" --out "$work/weights" \
  --models rank16="$work/rank16" all=$arms/full-200-0 --strategy k=1 k=2
cp "$work/weights/true_weights.json" docs/results/weights/my_way_home_adapters.json
cp "$work/weights/true_weights.md" docs/results/weights/my_way_home_adapters.md
