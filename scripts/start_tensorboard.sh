#!/usr/bin/env bash
# Show the curves of all runs in ./runs at http://localhost:6006.
# Flags are passed to tensorboard: ./start_tensorboard.sh --port 6007 --logdir other_runs
set -euo pipefail
repo=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/..
[ -x "$repo/.venv/bin/python" ] && PATH="$repo/.venv/bin:$PATH"
exec python -m tensorboard.main --logdir runs "$@"
