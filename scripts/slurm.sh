#!/usr/bin/env bash
# Train in a Slurm job that requeues itself at its time limit until the run is finished. In the repository's folder:
#     sbatch --nodes=2 --gpus-per-node=8 --time=24:00:00 scripts/slurm.sh --use_tensorboard [flags of train.py]
# `python train.py --help` lists the flags. docs/multi-node.md says where files must be.
#SBATCH --job-name=steadygpt
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
set -euo pipefail
# sbatch runs a copy of this script elsewhere, where it does not find common.sh.
case " $* " in *" -h "* | *" --help "*) sed -n '2,/^[^#]/s/^# //p' "$0"; exit ;; esac
[ -n "${SLURM_JOB_ID:-}" ] || { echo "error: SLURM_JOB_ID is not set; submit this script with sbatch (--help)" >&2; exit 2; }
export HEAD NNODES=$SLURM_JOB_NUM_NODES RUN_ID=$SLURM_JOB_ID PORT=${PORT:-$((20000 + SLURM_JOB_ID % 10000))}
read -r HEAD < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

at_limit=
trap 'at_limit=1' USR1  # Slurm signals this shell 120 s before the limit
srun --kill-on-bad-exit=1 scripts/multinode.sh "$@" &
step=$!
while kill -0 "$step" 2>/dev/null; do
    if [ "$at_limit" ]; then
        scancel --signal=USR1 "$SLURM_JOB_ID" || true  # the ranks stop and save; while they start, they ignore it
    fi
    sleep 2
done
wait "$step" && status=0 || status=$?
# A run that finished in its last 120 s is requeued too: it then reports that it is finished, and the job ends.
if [ "$at_limit" ] && [ "$status" -eq 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
