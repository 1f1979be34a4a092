#!/usr/bin/env bash
# A world of doom's codes in four places that knows raster order alone (the bundled one has learnt
# diagonals), and what adapters recover there (runs/adapters.sh). Goes on where it was killed; two
# and a half hours on two cores.
#   runs/adapters_doom.sh [FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
work=${1:-work/adapters_doom}
first=0
for scenario in maze defend_the_line health_gathering_supreme deathmatch; do
  diagd record --scenario $scenario --out "$work/train" --clips 100 --first-seed $first
  diagd record --scenario $scenario --out "$work/heldout" --clips 6 --first-seed $((1000000 + first))
  first=$((first + 100000))
done
diagd tokenize --clips "$work/train" --heldout "$work/heldout" --out "$work/tokens" \
  --tokenizer diagd/assets/doom/tokenizer --actions diagd/assets/doom/actions.json
python runs/transplant.py --world maze --tokens "$work/tokens" --clips "$work/train" --out "$work/start"
diagd finetune --init "$work/start" --tokens "$work/tokens" --out "$work/doom-raster" --frames 4 \
  --batch-size 4 --minutes 45 --strategy raster --no-compile
runs/adapters.sh "$work/doom-raster" "$work/tokens" 120 --clips 24 --seeds 0 1 2
