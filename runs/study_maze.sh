#!/usr/bin/env bash
# The paper's MC-AR table on the maze world: 64 held-out clips of 16 frames, 1 given. Run it on a
# machine that does nothing else, for the frames a second. A killed run goes on where it was.
#   runs/study_maze.sh CLIPS [LABEL=CHECKPOINT...]      # CLIPS: heldout of runs/maze.sh; finetuned
set -euo pipefail
cd "$(dirname "$0")/.."
clips=${1:?folder of held-out clips, as runs/maze.sh records them}
shift
work=${STUDY_WORK:-work/study}
diagd evaluate --protocol mc-ar --clips "$clips" --num-clips 64 --out "$work" --save-videos \
  --models maze "$@" --strategy "raster k=4 k=2 k=1"
diagd report --results "$work" --out "$work/report" \
  --title "MC-AR on ViZDoom: raster and diagonal decoding"
python runs/keep_report.py "$work/report" docs/results/study frontier
