#!/usr/bin/env bash
# Watch a run in the terminal: ./monitor_training.sh [RUN_FOLDER] [--once]
set -euo pipefail
repo=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/..
[ -x "$repo/.venv/bin/python" ] && PATH="$repo/.venv/bin:$PATH"
exec python "$repo/scripts/monitor_training.py" "$@"
