#!/usr/bin/env bash
# Show the curves of all runs in ./runs, or of the run with the checkpoints in RUN_FOLDER, at http://localhost:6006:
#     ./start_tensorboard.sh [RUN_FOLDER] [flags of tensorboard, such as --port 6007 --logdir other_runs]
set -euo pipefail
repo=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/..
[ -x "$repo/.venv/bin/python" ] && PATH="$repo/.venv/bin:$PATH"
case ${1:-} in
    --checkpoint?dir) shift ;;
    --checkpoint?dir=*) set -- "${1#*=}" "${@:2}" ;;
esac
logdir=runs
case ${1:-} in [!-]*)
    logdir=$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["tensorboard"])' "$1/status.json" 2>/dev/null || true)
    [ -n "$logdir" ] || { echo "error: $1/status.json: names no TensorBoard folder; expected the folder of a run with --use_tensorboard" >&2; exit 2; }
    shift
esac
exec python -m tensorboard.main --logdir "$logdir" "$@"
