#!/usr/bin/env bash
# Records what a world of several places learns from: the maze with a weapon, a fight, a walk for
# medicine, a deathmatch; 1,000 clips each to learn from and 64 held out, with seeds far away. Goes on
# where it was killed. All have the same actions, and seeds of their own, so one folder holds them:
#   runs/doom_data.sh [FOLDER]
#   diagd tokenize --clips FOLDER/train --heldout FOLDER/heldout --out FOLDER/tokens
# FOLDER/more is what the last stage learns from: other episodes, of players that wait, too, a fifth
# place, and episodes repainted in other colours.
set -euo pipefail
cd "$(dirname "$0")/.."
work=${1:-work/doom}
record() {
  diagd record --scenario "$@"
}
held_out() { # SCENARIO FIRST_SEED
  record "$1" --out "$work/heldout_$1" --clips 64 --first-seed "$2"
  mkdir -p "$work/heldout"
  ln -f "$work/heldout_$1"/* "$work/heldout/"
}
first=0
for scenario in maze defend_the_line health_gathering_supreme deathmatch; do
  record "$scenario" --out "$work/train" --clips 1000 --first-seed "$first"
  held_out "$scenario" $((1000000 + first))
  first=$((first + 100000))
done
held_out canyon 1400000
more=$work/more
record maze --out "$more" --clips 240 --first-seed 7000000
record defend_the_line --out "$more" --clips 200 --first-seed 7100000
record defend_the_line --policy sentry --out "$more" --clips 100 --first-seed 7110000
record health_gathering_supreme --out "$more" --clips 180 --first-seed 7200000
record deathmatch --out "$more" --clips 160 --first-seed 7300000
record deathmatch --policy sentry --out "$more" --clips 60 --first-seed 7310000
record canyon --out "$more" --clips 180 --frames 112 --first-seed 7400000
python -m runs.repaint --clips "$more" --out "$work/repainted" --count 160
ln -f "$work/repainted"/* "$more/"
