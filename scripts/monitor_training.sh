#!/usr/bin/env bash
# Watch a run in the terminal: ./monitor_training.sh [RUN_FOLDER] [--once] [--interval_s 2]
# --once prints one view, and exits with 0 if the run is healthy, with 1 if it failed, hangs or was killed.
# --interval_s sets the seconds between updates.
set -euo pipefail
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/common.sh"
use_python rich
exec python "$repo/scripts/monitor_training.py" "$@"
