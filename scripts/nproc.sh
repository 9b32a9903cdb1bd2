# Sourced by other scripts: sets repo and nproc (NPROC, or the number of GPUs), and prefers the environment .venv.
repo=$(readlink -f "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/..")
[ -x "$repo/.venv/bin/python" ] && PATH="$repo/.venv/bin:$PATH"
gpus=$( (nvidia-smi -L 2>/dev/null || true) | grep -c '^GPU' || true)
if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then  # empty or -1: no GPU
    gpus=$(tr ',' '\n' <<< "$CUDA_VISIBLE_DEVICES" | grep -c '^[^-]' || true)
fi
nproc=${NPROC:-$gpus}
