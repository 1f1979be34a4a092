#!/usr/bin/env bash
# Makes the bundled world `doom`: record five places, tokenize, carry the maze's world over, train on,
# bundle, measure. Every part goes on where it was killed. Ten hours on two cores that do nothing else,
# and ten minutes on a GPU: finetune takes the one that it finds.
#   runs/doom.sh [FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
work=${1:-work/doom}
export GLIBC_TUNABLES=glibc.malloc.hugetlb=1  # huge pages
runs/doom_data.sh "$work"
diagd tokenize --clips "$work/train" --heldout "$work/heldout" --out "$work/tokens" \
  --codes 4096 --decoder-only --steps 1200 --frame-stride 8
python runs/transplant.py --world maze --tokens "$work/tokens" --clips "$work/train" \
  --out "$work/start"
train() {
  diagd finetune --tokens "$work/tokens" "$@"
}
# Short sequences first, where a step is cheap; then the context the model ships with.
train --init "$work/start" --out "$work/stage1" --frames 4 --batch-size 8 --steps 2400 \
  --learning-rate 2e-3 --strategy raster k=1/action:2 k=2/action
train --init "$work/stage1" --out "$work/stage2" --frames 8 --batch-size 4 --steps 750 \
  --strategy raster k=1:2 k=2
train --init "$work/stage2" --out "$work/stage3" --frames 8 --batch-size 4 --steps 3000 \
  --learning-rate 1.5e-3 --strategy raster k=1:2 k=2
# Tokens that the model drew itself are what it meets in its own dreams: many of them, then some.
train --init "$work/stage3" --out "$work/stage4" --frames 8 --batch-size 4 --steps 1500 \
  --learning-rate 1.5e-3 --strategy raster k=1:2 k=2 --corrupt 0.5 --corrupt-with samples
train --init "$work/stage4" --out "$work/stage5" --frames 8 --batch-size 4 --steps 1150 \
  --learning-rate 1.2e-3 --strategy raster k=1:2 k=2 --corrupt 0.2 --corrupt-with samples
# Other episodes, of players that wait and of some that walk blindly, as one walks in a dream.
record() {
  diagd record --out "$work/others" --scenario "$@"
}
record maze --clips 240 --first-seed 7000000
record defend_the_line --clips 200 --first-seed 7100000
record defend_the_line --policy sentry --clips 100 --first-seed 7110000
record health_gathering_supreme --clips 180 --first-seed 7200000
record deathmatch --clips 160 --first-seed 7300000
record deathmatch --policy sentry --clips 60 --first-seed 7310000
first=9000000
for scenario in maze defend_the_line health_gathering_supreme deathmatch; do
  python -m runs.blind --scenario "$scenario" --out "$work/others" --count 160 --first-seed "$first"
  first=$((first + 100000))
done
diagd tokenize --clips "$work/others" --heldout "$work/heldout" --tokenizer "$work/tokens/tokenizer" \
  --out "$work/other_tokens"
# Five minutes on an H200; on two cores a day.
diagd finetune --tokens "$work/other_tokens" --init "$work/stage5" --out "$work/world" --frames 8 \
  --window 5 --batch-size 32 --steps 2167 --warmup-steps 60 --learning-rate 2e-3 \
  --strategy raster k=1:2 k=2 --corrupt 0.3 --corrupt-with samples
# From here on all layers but the first see the last two frames only: a full context costs less.
diagd finetune --tokens "$work/other_tokens" --init "$work/world" --out "$work/near" --frames 8 \
  --sliding-frames 2 --window 5 --batch-size 4 --steps 320 --warmup-steps 20 --learning-rate 2e-4 \
  --seed 1 --strategy raster k=1:2 k=2 --corrupt 0.3 --corrupt-with samples
# Textures that squared errors blur: a discriminator for the decoder, so tokens stay as they are.
first=6000000
for scenario in maze defend_the_line health_gathering_supreme deathmatch; do
  diagd record --scenario "$scenario" --out "$work/textures" --clips 40 --frames 48 \
    --first-seed "$first"
  first=$((first + 100000))
done
diagd tokenize --clips "$work/textures" --heldout "$work/heldout" --init "$work/near/tokenizer" \
  --out "$work/sharp" --decoder-only --sharpen 0.05 --steps 1200 --batch-size 4 --learning-rate 2e-4
cp "$work/sharp/tokenizer/"* "$work/near/tokenizer/"
# Starts are chosen by eye; the fifth place is another level, of rocks and trees by night.
bundle() {
  python runs/bundle.py --clips "$work/heldout" \
    --prompt clip_1300004:20 --scenes soldier=clip_1300001:40 guards=clip_1300000:8 \
    worms=clip_1100007:12 medicine=clip_1200000:42 computers=clip_1000000:20 lamps=clip_1000003:54 \
    green-hall=clip_1000005:30 machines=clip_1000009:0 trees=clip_1400006:20 \
    --top-p 0.98 --remember 5 --walk "attack*3,left*3,forward*5,attack+left*2,attack*3" "$@"
}
diagd record --out "$work/heldout_canyon" --scenario canyon --clips 64 --first-seed 1400000
ln -f "$work/heldout_canyon"/* "$work/heldout/"
bundle --world "$work/near" --blend "$work/world=0.5" --out "$work/sliding"
# A fifth place, and more of the four: five minutes on an H200.
diagd record --out "$work/canyon" --scenario canyon --clips 180 --frames 112 --first-seed 7400000
mkdir -p "$work/five"
for clips in maze:130:9500000 maze:100:9510000 defend_the_line:50:9600000 canyon:120:9400000 \
  health_gathering_supreme:110:9700000 health_gathering_supreme:70:10200000 \
  deathmatch:110:9800000 deathmatch:70:10000000; do
  IFS=: read -r scenario count first <<<"$clips"
  python -m runs.blind --scenario "$scenario" --out "$work/five_$first" --count "$count" \
    --first-seed "$first"
  ln -f "$work/five_$first"/* "$work/five/"
done
for folder in others canyon; do ln -f "$work/$folder"/* "$work/five/"; done
diagd tokenize --clips "$work/five" --heldout "$work/heldout" --tokenizer "$work/near/tokenizer" \
  --out "$work/five_tokens"
diagd finetune --init "$work/sliding" --tokens "$work/five_tokens" --out "$work/places" --frames 8 \
  --window 5 --batch-size 32 --steps 2191 --warmup-steps 60 --learning-rate 2e-3 \
  --strategy raster k=1:3 k=2 --corrupt 0.3 --corrupt-with samples
# The decoder has not seen the canyon yet: once more, with its rocks and trees.
diagd record --out "$work/textures" --scenario canyon --clips 40 --frames 48 --first-seed 6400000
diagd tokenize --clips "$work/textures" --heldout "$work/heldout" --init "$work/near/tokenizer" \
  --out "$work/sharp5" --decoder-only --sharpen 0.05 --steps 1200 --batch-size 4 --learning-rate 2e-4
cp "$work/sharp5/tokenizer/"* "$work/places/tokenizer/"
bundle --world "$work/places" --blend "$work/sliding=0.2" --out diagd/assets/doom
python -m runs.sharpness --data "$work" --out docs/results/world/sharpness.json \
  --tokenizers before="$work/near/tokenizer" after="$work/sharp5/tokenizer"
python -m runs.acceptance --data "$work"
python -m runs.acceptance --data "$work" --models maze=maze --scenarios maze
cp work/acceptance/{acceptance.md,doom.webp,turns.webp} docs/results/world/
