#!/usr/bin/env bash
# Resume a run from its latest checkpoint, on all GPUs of this machine: ./resume_training.sh [flags of train.py]
# NPROC=2 ./resume_training.sh sets the number of processes. It may differ from the number before.
set -euo pipefail
repo=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/..
[ -x "$repo/.venv/bin/python" ] && PATH="$repo/.venv/bin:$PATH"
gpus=$( (nvidia-smi -L 2>/dev/null || true) | grep -c '^GPU' || true)
if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then  # empty or -1: no GPU
    gpus=$(tr ',' '\n' <<< "$CUDA_VISIBLE_DEVICES" | grep -c '^[^-]' || true)
fi
nproc=${NPROC:-$gpus}
if [ "$nproc" -gt 1 ]; then
    exec torchrun --standalone --nproc_per_node="$nproc" "$repo/train.py" --resume latest "$@"
fi
exec python "$repo/train.py" --resume latest "$@"
