#!/usr/bin/env bash
# Train on several machines. Run the same command on each of them, where HEAD is the name or address of one of them:
#     HEAD=node1 NNODES=2 scripts/multinode.sh --use_tensorboard [flags of train.py]
# The run starts, or resumes from its latest checkpoint. NNODES=1:2 also trains on one node while the other is away.
# NPROC (processes on this machine, default: its GPUs), PORT (29400), RUN_ID (steadygpt), MAX_RESTARTS (3) and RDZV_CONF
# (such as last_call_timeout=5) are optional. docs/multi-node.md explains what happens when a node fails, and
# `python train.py --help` lists the flags.
set -euo pipefail
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/common.sh"
[ -n "${HEAD:-}" ] || fail "HEAD is not set; expected the name or address of one node, the same on every node"
case ${NNODES:-} in '' | *[!0-9:]*) fail "NNODES is '${NNODES:-}'; expected the number of nodes, such as 2, or a range, such as 1:2" ;; esac
use_python torch
count_processes
# Without this, PyTorch 2.13 does not tell a returning node the address of rank 0, and the restart times out.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"  # warnings have a trace of 30 lines each
trap '' USR1  # torchrun would die of it; the ranks install their own handler, which stops the run and saves
command=(
    torchrun --nnodes="$NNODES" --nproc_per_node="$nproc" --max-restarts="${MAX_RESTARTS:-3}"
    --rdzv_backend=c10d --rdzv_endpoint="$HEAD:${PORT:-29400}" --rdzv_id="${RUN_ID:-steadygpt}"
    --rdzv_conf="join_timeout=86400${RDZV_CONF:+,$RDZV_CONF}" "$repo/train.py" --resume auto "$@"
)
echo "+$(printf ' %q' "${command[@]}")"
exec "${command[@]}"
