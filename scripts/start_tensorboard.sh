#!/usr/bin/env bash
# The curves of all runs, at http://localhost:6006: ./start_tensorboard.sh [any flags of tensorboard, e.g. --port 6007]
set -euo pipefail
repo=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/..
[ -x "$repo/.venv/bin/python" ] && PATH="$repo/.venv/bin:$PATH"
exec python -m tensorboard.main --logdir runs "$@"
