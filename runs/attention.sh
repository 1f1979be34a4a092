#!/usr/bin/env bash
# Regenerates docs/results/attention.png and attention.json: where the maze world looks when it
# writes the second of two frames. The control, before training, goes to
# work/. The clips are the held-out ones of runs/maze.sh.
# usage: runs/attention.sh [FOLDER OF CLIPS]
set -euo pipefail
cd "$(dirname "$0")/.."
clips=${1:-work/maze/heldout}
diagd attention --model maze --clips "$clips" --num-clips 16 --output docs/results/attention.png
python runs/attention_start.py --out work/attention_start.json
