#!/usr/bin/env bash
# Resume a run from its latest checkpoint, on all GPUs of this machine:
#     ./resume_training.sh [RUN_FOLDER] [flags of train.py]
# NPROC=2 sets the number of processes, which may differ from the number before. `python train.py --help` lists the flags.
set -euo pipefail
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/common.sh"
use_python torch
count_processes
case ${1:-} in [!-]*) set -- --checkpoint_dir "$@" ;; esac
set_command --resume latest "$@"
exec "${command[@]}"
