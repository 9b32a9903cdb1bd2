#!/usr/bin/env bash
# Ask for model and data, print the command and its plan, train, and show the monitor:
#     ./start_training.sh [--yes] [flags of train.py]
# Enter accepts the answer in brackets, --yes accepts all. NPROC=2 sets the number of processes.
set -euo pipefail
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/nproc.sh"
GPUS=$gpus exec python "$repo/scripts/start_training.py" "$@"
