#!/usr/bin/env bash
# Regenerates docs/results/bench_gpu.jsonl on a CUDA device, piece by piece. Not run yet: no GPU was
# at hand.
#
#   bash runs/bench_gpu.sh               # the pieces that are not there yet: go on after a kill so
#   bash runs/bench_gpu.sh cosmos-4b     # this piece alone, there or not
#
# A piece takes minutes and is kept in docs/results/gpu/. One that fails does not stop the others.
set -euo pipefail
cd "$(dirname "$0")/.."
results=docs/results/bench_gpu.jsonl
pieces=docs/results/gpu
names=(mc-ar-300m mc-ar-1.2b wham-1.6b cosmos-4b cosmos-12b)

flags() {
  case $1 in
    mc-ar-300m) echo --grid 4x14x24 -k 1 2 4 ;;
    mc-ar-1.2b) echo --grid 2x14x24 -k 1 2 4 ;;
    wham-1.6b) echo --grid 2x18x30 -k 1 2 4 --baseline none ;;
    cosmos-4b) echo --grid 3x40x64 --context-frames 2 --overlap -k 1 2 --baseline none ;;
    cosmos-12b) echo --grid 3x40x64 --context-frames 2 --overlap -k 1 --baseline none ;;
    *) echo "error: a piece is one of ${names[*]}, got $1" >&2; exit 2 ;;
  esac
}

for name in "$@"; do flags "$name" > /dev/null; done
mkdir -p "$pieces"
failed=()
for name in "${@:-${names[@]}}"; do
  if [ $# -eq 0 ] && [ -f "$pieces/$name.json" ]; then continue; fi
  read -ra chosen <<< "$(flags "$name")"
  partial="$pieces/$name.json.partial"
  if diagd bench --device cuda --dtype bfloat16 --model "$name" "${chosen[@]}" --json > "$partial"
  then mv "$partial" "$pieces/$name.json"
  else rm "$partial"; failed+=("$name")
  fi
done

for name in "${names[@]}"; do
  if [ -f "$pieces/$name.json" ]; then cat "$pieces/$name.json"; fi
done > "$results.partial"
if [ -s "$results.partial" ]; then
  mv "$results.partial" "$results"
  python runs/speed_report.py --results docs/results
else
  rm "$results.partial"
fi
if [ ${#failed[@]} -gt 0 ]; then echo "error: failed: ${failed[*]}" >&2; exit 1; fi
