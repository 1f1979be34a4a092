#!/usr/bin/env bash
# Makes the bundled world `maze` from nothing: record, tokenize, train, bundle. The studies of docs/ were
# made on it and on its clips. Every part goes on where it was killed. About two hours on two cores with AMX
# that do nothing else.
#   runs/maze.sh [FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
work=${1:-work/maze}
export GLIBC_TUNABLES=glibc.malloc.hugetlb=1  # huge pages
diagd record --scenario my_way_home --out "$work/train" --clips 1024
diagd record --scenario my_way_home --out "$work/heldout" --clips 64 --first-seed 1000000
diagd tokenize --clips "$work/train" --heldout "$work/heldout" --out "$work/tokens" \
  --decoder-only --steps 500
train() {
  diagd train --tokens "$work/tokens" --model mc-ar-doom "$@"
}
# Short sequences first, where a step is cheap; then the context the model ships with.
train --out "$work/stage1" --frames 4 --batch-size 4 --steps 3000 --hold 0.2
train --out "$work/world" --init "$work/stage1" --frames 8 --batch-size 2 --steps 2400 \
  --learning-rate 1.5e-3 --hold 0.1
python runs/bundle.py --world "$work/world" --clips "$work/heldout" --out diagd/assets/maze \
  --prompt clip_1000016:14 --scenes computers=clip_1000000:37 crossroads=clip_1000006:37 \
  green-hall=clip_1000044:37 lamps=clip_1000036:37 red-door=clip_1000002:37
