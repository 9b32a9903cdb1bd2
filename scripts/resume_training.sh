#!/usr/bin/env bash
# Resume a run from its latest checkpoint, on all GPUs of this machine:
#     ./resume_training.sh [RUN_FOLDER] [flags of train.py]
# NPROC=2 ./resume_training.sh sets the number of processes. It may differ from the number before.
set -euo pipefail
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/nproc.sh"
case ${1:-} in [!-]*) set -- --checkpoint_dir "$@" ;; esac
if [ "$nproc" -gt 1 ]; then
    exec torchrun --standalone --nproc_per_node="$nproc" "$repo/train.py" --resume latest "$@"
fi
exec python "$repo/train.py" --resume latest "$@"
