#!/usr/bin/env bash
# Makes the bundled world model from nothing: record, tokenize, train, bundle, measure. Every part
# goes on where it was killed. About two hours on two cores with AMX that do nothing else.
set -euo pipefail
cd "$(dirname "$0")/.."
work=${1:-work/doom}
export GLIBC_TUNABLES=glibc.malloc.hugetlb=1  # huge pages
diagd record --out "$work/train" --clips 1024
diagd record --out "$work/heldout" --clips 64 --first-seed 1000000
diagd tokenize --clips "$work/train" --heldout "$work/heldout" --out "$work/tokens" \
  --decoder-only --steps 500
train() {
  diagd train --tokens "$work/tokens" --model mc-ar-doom "$@"
}
# Short sequences first, where a step is cheap; then the context the model ships with.
train --out "$work/stage1" --frames 4 --batch-size 4 --steps 3000 --hold 0.2
train --out "$work/model" --init "$work/stage1" --frames 8 --batch-size 2 --steps 2400 \
  --learning-rate 1.5e-3 --hold 0.1
python runs/bundle.py --world "$work/model" \
  --clip "$work/heldout/clip_1000016.mp4" --first-frame 14 --out diagd/assets/doom
python runs/doom_actions.py --tokens "$work/tokens/heldout" --out docs/results
python -m runs.doom_quality --clips "$work/heldout" --out docs/results --num-clips 64
