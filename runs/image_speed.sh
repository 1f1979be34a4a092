#!/usr/bin/env bash
# Seconds an image at true size, random weights: Janus-Pro-1B against transformers' own loop, and
# LlamaGen-111M and -343M (256 px, without guidance) against a LLaMA of transformers. Half an hour; nothing
# else should run.
set -euo pipefail
cd "$(dirname "$0")/.."
results=docs/results/images
mkdir -p "$results"
python -m runs.image_speed --out "$results/janus-pro-1b.json"
for model in llamagen-b llamagen-l; do
  diagd bench --model "$model" --grid 1x16x16 --dtype float32 int8 -k 1 2 --json > "$results/$model.partial"
  mv "$results/$model.partial" "$results/$model.json"
done
