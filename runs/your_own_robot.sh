#!/usr/bin/env bash
# From a robot's LeRobot dataset to a world to steer, as in docs/your-own-robot.md: records a simulated arm, trains its
# world, moves the dreamt arm both ways, and measures whether it obeys. Every part but the recording goes on where it was
# killed. Within an hour on two cores; needs `pip install -e '.[robots,gym,train]' 'gymnasium[mujoco]>=1.3'`.
#   runs/your_own_robot.sh [FOLDER] [MINUTES of training]
set -euo pipefail
cd "$(dirname "$0")/.."
work=${1:-work/robot} minutes=${2:-30}
export MUJOCO_GL=${MUJOCO_GL:-egl}  # draws without a display
if [ ! -d "$work/dataset" ]; then
  python runs/robot_data.py --out "$work/dataset"
fi
diagd tokenize --lerobot "$work/dataset" --out "$work/tokens" --codes 512 --bins 21
diagd check "$work/tokens/clips"
diagd train --tokens "$work/tokens" --out "$work/world" --minutes "$minutes"
for side in min max; do
  diagd generate --model "$work/world" --frames 24 --actions "shoulder_rad_s=$side*24" --output "$work/shoulder-$side.gif"
done
python runs/robot_steering.py --world "$work/world" --clips "$work/tokens/clips" --out "$work/steering.json" \
  --picture "$work/steering.png"
diagd tune --model "$work/world" --tokens "$work/tokens" --out "$work/tuning"
