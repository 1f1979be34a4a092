#!/usr/bin/env bash
# Records what a world of several places learns from: the maze with a weapon, a fight, a walk for
# medicine, a deathmatch; 1,000 clips each to learn from and 64 held out, with seeds far away. Goes on
# where it was killed. All have the same actions, and seeds of their own, so one folder holds them:
#   runs/doom_data.sh [FOLDER]
#   diagd tokenize --clips FOLDER/train --heldout FOLDER/heldout --out FOLDER/tokens
set -euo pipefail
cd "$(dirname "$0")/.."
work=${1:-work/doom}
first=0
for scenario in maze defend_the_line health_gathering_supreme deathmatch; do
  diagd record --scenario "$scenario" --out "$work/train" --clips 1000 --first-seed "$first"
  diagd record --scenario "$scenario" --out "$work/heldout_$scenario" --clips 64 \
    --first-seed $((1000000 + first))
  mkdir -p "$work/heldout"
  ln -f "$work/heldout_$scenario"/* "$work/heldout/"
  first=$((first + 100000))
done
