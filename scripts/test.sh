#!/usr/bin/env bash
# Style, types and tests, on the CPU and without a network, in parallel. Further arguments go to pytest:
#   scripts/test.sh -k resume
#   scripts/test.sh -n 0          one test at a time
#   scripts/test.sh --pages       the documentation site, and the tests of docs, notebook and benchmarks, alone
set -euo pipefail
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/common.sh"
cd "$repo"

scripts/setup.sh test
if [[ ${1-} == --pages ]]; then
  shift
  # Without --quiet: it hides the warnings, and then --strict does not count them.
  site=$(NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict --site-dir .venv/site 2>&1) || { echo "$site"; exit 1; }
  tests="pages and not storm"
else
  .venv/bin/ruff check .
  .venv/bin/ruff format --check .
  .venv/bin/mypy
  tests="not pages and not storm"
fi
# Thousands of small runs wait for the disk at each of their saves, unless there is memory for their folders.
if [ "$(df --output=avail -B G /dev/shm 2>/dev/null | tr -dc 0-9)" -ge 4 ] 2>/dev/null; then
  TMPDIR=$(mktemp -d -p /dev/shm) && export TMPDIR
  trap 'rm -rf "$TMPDIR"' EXIT
fi
export PYTHONPYCACHEPREFIX=$PWD/.venv/pycache PYTHONDONTWRITEBYTECODE=  # workers compile the tests once
# A worker more than there are cores, because tests also wait; each takes a GB and ten seconds to start.
workers=$(($(nproc) < 7 ? $(nproc) + 1 : 8))
.venv/bin/python -m pytest -q -n "$workers" --dist worksteal --durations=10 -m "$tests" "$@"
