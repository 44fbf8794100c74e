#!/usr/bin/env bash
# All checks on a machine with a GPU, from this working tree and a folder of wheels; nothing is downloaded.
#
#   bash bench/gpu.sh WHEELS RESULTS [--minutes 6] [further arguments of `python -m tokenlake_bench.gpu`]
#
# WHEELS: the folder that `python -m tokenlake_bench.gpu.wheels` filled. RESULTS: a folder for gpu.json and the log. PYTHON names the
# interpreter that has torch (default: python3). Exit status: that of the checks.
set -euo pipefail
mkdir -p "$2"
wheels=$(realpath "$1") results=$(realpath "$2")
shift 2
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
"$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl
export PYTHONPATH="$site:$PWD:$PWD/server:$PWD/client:$PWD/query:$PWD/proto:$PWD/bench" PYTHONUNBUFFERED=1

"$python" -m tokenlake_bench.gpu --minutes 6 --json "$results/gpu.json" "$@" 2>&1 | tee "$results/gpu.log"
