#!/usr/bin/env bash
# Create .venv with the exact versions of scripts/requirements.txt. If they are installed already, change nothing.
#   ./setup.sh          packages for training
#   ./setup.sh test     also the packages for scripts/test.sh
#   ./setup.sh --check  install nothing; check this machine and print the plan of GPT-2, or of a run with other flags
# PYTHON=python3.12 ./setup.sh selects the interpreter; TORCH=cuda installs PyTorch for NVIDIA GPUs where there is none.
set -euo pipefail
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/common.sh"
cd "$repo"

if [ "${1:-}" = --check ]; then
    use_python torch
    exec python train.py --dry_run "${@:2}"
fi
list=scripts/requirements${1:+-$1}.txt
[ -f "$list" ] || fail "found './setup.sh $1', expected './setup.sh', './setup.sh test' or './setup.sh --check'"

version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
for python in ${PYTHON:-.venv/bin/python python3 python3.13 python3.12 python3.11} none; do
    case $(version "$python") in 3.1[1-9]) break ;; esac
done
[ "$python" != none ] || fail "found no Python 3.11 or later. Install it, or give its path: PYTHON=/path/to/python3 ./setup.sh"
found=$(version .venv/bin/python || true)  # empty: there is no .venv, or its interpreter was removed
expected=$(version "$python")
[ "${found:-$expected}" = "$expected" ] ||
    fail ".venv has Python $found, but $python is Python $expected. To replace it: rm -rf .venv && PYTHON=$python ./setup.sh"

stamp=.venv/installed-$(cat scripts/requirements.txt "$list" | cksum | cut -d' ' -f1)
if [ ! -f "$stamp" ]; then
    echo "installing $list into .venv"
    # pip answers Ctrl-C with the status of an error.
    trap 'echo "stopped; run it again to continue the installation" >&2; exit 130' INT
    [ -n "$found" ] || rm -rf .venv
    # A Ctrl-C during an earlier start may have left a part of .venv. It gets pip first and activate last.
    # These seconds ignore Ctrl-C, which Python would answer with a traceback; the trap has the signal afterwards.
    [ -f .venv/bin/activate ] && .venv/bin/python -m pip --version &> /dev/null ||
        (trap '' INT && exec "$python" -m venv .venv)
    pip=(.venv/bin/python -m pip install --disable-pip-version-check)
    torch=$(grep '^torch==' scripts/requirements.txt)
    if [ "$(uname -sm)" = "Linux x86_64" ] && [ "${TORCH:-}" != cuda ] && ! nvidia-smi -L 2>/dev/null | grep -q ^GPU; then
        echo "no NVIDIA GPU here, so PyTorch for CPUs: a download of 0.2 GB instead of 3 GB"
        echo "for GPUs: rm -rf .venv && TORCH=cuda ./setup.sh"
        "${pip[@]}" --retries 1 --no-deps --index-url https://download.pytorch.org/whl/cpu "$torch" ||
            echo "PyTorch for CPUs is not available; installing PyTorch for GPUs"
    fi
    "${pip[@]}" -r "$list"
    touch "$stamp"
fi
echo ".venv has all packages of $list. To use it: source .venv/bin/activate"
