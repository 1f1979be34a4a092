#!/usr/bin/env bash
# Makes the bundled world model from nothing: record, tokenize, train, measure. Resumes where it was
# killed. About two and a half hours on two cores with AMX.
set -euo pipefail
cd "$(dirname "$0")/.."
work=${1:-work/doom}
diagd record --out "$work/train" --clips 1500
diagd record --out "$work/heldout" --clips 64 --first-seed 1000000
