#!/usr/bin/env bash
# Watch a run in the terminal: ./monitor_training.sh [RUN_FOLDER] [--once]
set -euo pipefail
needs=rich
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/python.sh"
exec python "$repo/scripts/monitor_training.py" "$@"
