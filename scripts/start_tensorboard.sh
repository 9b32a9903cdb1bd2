#!/usr/bin/env bash
# Show the curves of all runs in FOLDER and below it, by default checkpoints, at http://localhost:6006:
#     ./start_tensorboard.sh [FOLDER] [flags of tensorboard, such as --port 6007]
set -euo pipefail
needs=tensorboard
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/python.sh"
case ${1:-} in
    --checkpoint?dir) shift ;;
    --checkpoint?dir=*) set -- "${1#*=}" "${@:2}" ;;
esac
folder=checkpoints
case ${1:-} in [!-]*) folder=$1; shift ;; esac
[ -d "$folder" ] || { echo "error: $folder: no such folder; expected that of a run with --use_tensorboard, or one above it" >&2; exit 2; }
exec python -m tensorboard.main --logdir "$folder" "$@"
