#!/usr/bin/env bash
# What adapters recover of what finetuning all weights does: the arms of runs/arms.py's study
# `adapters` for a world and its tokens (runs/maze.sh, runs/adapters_doom.sh), then the tables. Goes
# on where it was killed; a call ends after MINUTES.
#   runs/adapters.sh WORLD TOKENS MINUTES [FLAGS OF runs/arms.py]
set -euo pipefail
cd "$(dirname "$0")/.."
world=$1 tokens=$2 minutes=$3 name=$(basename "$1")
shift 3
python runs/arms.py --study adapters --changes "init=$world" --tokens "$tokens" \
  --work "work/adapters/$name" --out "work/adapters/results/$name" --minutes "$minutes" \
  --no-compile "$@"
python runs/adapters_report.py --results work/adapters/results --out docs/results/adapters
