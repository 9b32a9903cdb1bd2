#!/usr/bin/env bash
# Create .venv with the exact versions of scripts/requirements.txt. If they are installed already, do nothing.
#   ./setup.sh          packages for training
#   ./setup.sh test     also the packages for scripts/test.sh
#   ./setup.sh --check  install nothing; check this machine and print the plan of GPT-2, or of a run with other flags
# PYTHON=python3.12 ./setup.sh selects the interpreter.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    for python in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if is_recent "$python"; then return; fi
    done
    python=
}
missing="found no Python 3.11 or later. Install it, or give its path: PYTHON=/path/to/python3 ./setup.sh"

if [ "${1:-}" = --check ]; then
    if is_recent .venv/bin/python; then python=.venv/bin/python; else find_python; fi
    [ -n "$python" ] || { echo "error: $missing" >&2; exit 2; }
    "$python" -c 'import torch' || { echo "error: PyTorch cannot be imported; run ./setup.sh, or rm -rf .venv first" >&2; exit 2; }
    shift
    exec "$python" train.py --dry_run "$@"
fi

list=scripts/requirements${1:+-$1}.txt
[ -f "$list" ] || { echo "error: found './setup.sh $1', expected './setup.sh', './setup.sh test' or './setup.sh --check'" >&2; exit 2; }
stamp=.venv/installed-$(cat scripts/requirements.txt "$list" | cksum | cut -d' ' -f1)
[ -f "$stamp" ] && exit 0

find_python
[ -n "$python" ] || { echo "error: $missing" >&2; exit 2; }

# Create .venv again if it is incomplete or has an older Python.
is_recent .venv/bin/python || { rm -rf .venv; "$python" -m venv .venv; }
echo "installing $list into .venv: PyTorch for a GPU is a download of 3 GB"
pip() { .venv/bin/python -m pip install --disable-pip-version-check "$@"; }
pip --quiet 'pip>=24.1'  # older ones have no --progress-bar raw
pip --progress-bar raw -r "$list" | .venv/bin/python scripts/pip_progress.py
touch "$stamp"
