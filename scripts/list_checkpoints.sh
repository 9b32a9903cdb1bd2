#!/usr/bin/env bash
# List the checkpoints of a run; -v verifies each file: ./list_checkpoints.sh [RUN_FOLDER] [-v] [flags of train.py]
# `python train.py --help` lists the flags; --mirror names the mirror of a run that is not on this machine.
set -euo pipefail
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/common.sh"
use_python torch
[ "${1:-}" = -v ] && set -- "${@:2}" -v  # the folder may follow it
case ${1:-} in [!-]*) set -- --checkpoint_dir "$@" ;; esac
exec python "$repo/train.py" --list_checkpoints "$@"
