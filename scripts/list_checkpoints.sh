#!/usr/bin/env bash
# List the checkpoints of a run; -v verifies each file: ./list_checkpoints.sh [RUN_FOLDER] [flags of train.py]
set -euo pipefail
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/python.sh"
[ "${1:-}" = -v ] && set -- "${@:2}" -v  # the folder may follow it
case ${1:-} in [!-]*) set -- --checkpoint_dir "$@" ;; esac
exec python "$repo/train.py" --list_checkpoints "$@"
