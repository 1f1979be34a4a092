#!/usr/bin/env bash
# A stage for the bundled world `doom` that was measured and left out (docs/log.md): other episodes, of
# players that wait, too, a fifth place, and episodes repainted in other colours. Goes on where it was
# killed. Two hours on two cores, after `runs/doom_data.sh`, whose held-out clips it wants:
#   runs/doom_more.sh [FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
work=${1:-work/doom}
others=$work/others
record() {
  diagd record --scenario "$@"
}
record maze --out "$others" --clips 240 --first-seed 7000000
record defend_the_line --out "$others" --clips 200 --first-seed 7100000
record defend_the_line --policy sentry --out "$others" --clips 100 --first-seed 7110000
record health_gathering_supreme --out "$others" --clips 180 --first-seed 7200000
record deathmatch --out "$others" --clips 160 --first-seed 7300000
record deathmatch --policy sentry --out "$others" --clips 60 --first-seed 7310000
record canyon --out "$others" --clips 180 --frames 112 --first-seed 7400000
record canyon --out "$work/heldout_canyon" --clips 64 --first-seed 1400000
python -m runs.repaint --clips "$others" --out "$work/repainted" --count 160
mkdir -p "$work/more"
for folder in "$others" "$work/repainted"; do
  ln -f "$folder"/* "$work/more/"
done
diagd tokenize --clips "$work/more" --heldout "$work/heldout" --tokenizer diagd/assets/doom/tokenizer \
  --out "$work/more_tokens"
diagd finetune --init doom --tokens "$work/more_tokens" --out "$work/more_world" --frames 5 \
  --batch-size 6 --steps 856 --warmup-steps 40 --learning-rate 4e-4 --strategy raster k=1:2 k=2 \
  --corrupt 0.2 --corrupt-with samples
python runs/bundle.py --world "$work/more_world" --blend doom=0.2 --clips "$work/heldout" \
  --out "$work/blended" --prompt clip_1300004:20 --top-p 0.98 --remember 5
python -m runs.foreign --models before=doom after="$work/blended" \
  --out docs/results/world/foreign.json
python -m runs.acceptance --data "$work" --models doom=doom blended="$work/blended" --num-clips 16
