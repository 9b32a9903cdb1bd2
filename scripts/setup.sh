#!/usr/bin/env bash
# Make .venv with exactly the versions of scripts/requirements.txt; does nothing where all is there.
#   scripts/setup.sh          what training needs
#   scripts/setup.sh test     and what scripts/test.sh needs
# PYTHON=python3.12 scripts/setup.sh chooses the interpreter.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

list=scripts/requirements${1:+-$1}.txt
[ -f "$list" ] || { echo "error: no $list; expected 'scripts/setup.sh' or 'scripts/setup.sh test'" >&2; exit 2; }
stamp=.venv/installed-$(cat scripts/requirements.txt "$list" | cksum | cut -d' ' -f1)
[ -f "$stamp" ] && exit 0

recent='import sys; sys.exit(sys.version_info < (3, 11))'
for python in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$python" -c "$recent" 2>/dev/null; then break; fi
    python=
done
[ -n "$python" ] || { echo "error: no Python 3.11 or later found; install one, or name it: PYTHON=/path/to/python3" >&2; exit 2; }

# A .venv that another Python made, or that is half made, is made again.
.venv/bin/python -c "$recent" 2>/dev/null || { rm -rf .venv; "$python" -m venv .venv; }
echo "installing $list into .venv (a minute or a few: PyTorch is large)"
.venv/bin/python -m pip install --quiet --disable-pip-version-check -r "$list"
touch "$stamp"
