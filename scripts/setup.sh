#!/usr/bin/env bash
# Create .venv with the exact versions of scripts/requirements.txt. If they are installed already, do nothing.
#   ./setup.sh          packages for training
#   ./setup.sh test     also the packages for scripts/test.sh
# PYTHON=python3.12 ./setup.sh selects the interpreter.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

list=scripts/requirements${1:+-$1}.txt
[ -f "$list" ] || { echo "error: $list: no such file; expected './setup.sh' or './setup.sh test'" >&2; exit 2; }
stamp=.venv/installed-$(cat scripts/requirements.txt "$list" | cksum | cut -d' ' -f1)
[ -f "$stamp" ] && exit 0

recent='import sys; sys.exit(sys.version_info < (3, 11))'
for python in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$python" -c "$recent" 2>/dev/null; then break; fi
    python=
done
[ -n "$python" ] || { echo "error: found no Python 3.11 or later. Install it, or give its path: PYTHON=/path/to/python3 ./setup.sh" >&2; exit 2; }

# Create .venv again if it is incomplete or has an older Python.
.venv/bin/python -c "$recent" 2>/dev/null || { rm -rf .venv; "$python" -m venv .venv; }
echo "installing $list into .venv (takes some minutes: PyTorch is large)"
.venv/bin/python -m pip install --quiet --disable-pip-version-check -r "$list"
touch "$stamp"
