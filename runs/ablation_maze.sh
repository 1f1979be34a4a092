#!/usr/bin/env bash
# The ablation of k and d by generation (paper, appendix), actions known ahead, and the three stand-ins
# at row starts: held-out clips of 16 frames, 1 given. By likelihood: runs/finetune_maze.sh. Goes on where
# it was killed.
#   runs/ablation_maze.sh CLIPS      # CLIPS: heldout of runs/maze.sh
set -euo pipefail
cd "$(dirname "$0")/.."
clips=${1:?folder of held-out clips, as runs/maze.sh records them}
work=${ABLATION_WORK:-work/ablation}
diagd evaluate --protocol mc-ar --models maze --clips "$clips" \
  --num-clips "${ABLATION_CLIPS:-32}" --out "$work" \
  --strategy "k=1 k=1,d=14 k=1,d=7 k=1,d=3 k=2 k=2,d=28 k=2,d=14 k=2,d=7 k=4 k=4,d=56" \
  "k=1/predecessor k=1/spatial k=2/predecessor k=2/spatial"
diagd report --results "$work" --out "$work/report" --examples 0 --title "k, d and row starts by generation"
python runs/keep_report.py "$work/report" docs/results/ablation frontier
