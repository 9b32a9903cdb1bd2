#!/usr/bin/env bash
# Show the curves of all runs in FOLDER and below it, by default checkpoints, at http://localhost:6006:
#     ./start_tensorboard.sh [FOLDER] [flags of tensorboard, such as --port 6007]
set -euo pipefail
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/common.sh"
use_python tensorboard
folder=checkpoints
case ${1:-} in [!-]*) folder=$1; shift ;; esac
[ -n "$(ls "$folder" 2>/dev/null)" ] || fail "$folder: no run there; expected that of a run with --use_tensorboard, or one above it"
exec python -m tensorboard.main --logdir "$folder" "$@"
