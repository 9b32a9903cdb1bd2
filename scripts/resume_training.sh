#!/usr/bin/env bash
# Continue a run where it stopped, on all GPUs of this machine: ./resume_training.sh [any flags of train.py]
# NPROC=2 ./resume_training.sh chooses the number of processes; it need not be the one before.
set -euo pipefail
repo=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/..
[ -x "$repo/.venv/bin/python" ] && PATH="$repo/.venv/bin:$PATH"
gpus=$( (nvidia-smi -L 2>/dev/null || true) | grep -c '^GPU' || true)
[ -z "${CUDA_VISIBLE_DEVICES:-}" ] || gpus=$(tr ',' '\n' <<< "$CUDA_VISIBLE_DEVICES" | grep -c .)
nproc=${NPROC:-$gpus}
if [ "$nproc" -gt 1 ]; then
    exec torchrun --standalone --nproc_per_node="$nproc" "$repo/train.py" --resume latest "$@"
fi
exec python "$repo/train.py" --resume latest "$@"
