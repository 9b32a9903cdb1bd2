# Sourced by other scripts: as python.sh, and sets nproc (NPROC, or the number of GPUs) and how threads wait.
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/python.sh"
gpus=$( (nvidia-smi -L 2>/dev/null || true) | grep -c '^GPU' || true)
if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then  # empty or -1: no GPU
    gpus=$(tr ',' '\n' <<< "$CUDA_VISIBLE_DEVICES" | grep -c '^[^-]' || true)
fi
# By default, waiting threads spin, which slows training on a CPU down many times while other programs run.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
nproc=${NPROC:-$gpus}
case $nproc in *[!0-9]*) echo "error: NPROC is $nproc; expected a number of processes" >&2; exit 2 ;; esac
