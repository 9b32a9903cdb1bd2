#!/usr/bin/env bash
# List the checkpoints of a run and verify each file: ./list_checkpoints.sh [--checkpoint_dir checkpoints]
set -euo pipefail
repo=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/..
[ -x "$repo/.venv/bin/python" ] && PATH="$repo/.venv/bin:$PATH"
exec python "$repo/train.py" --list_checkpoints "$@"
