#!/usr/bin/env bash
# Style, types and tests, on the CPU, without a network; further arguments go to pytest (scripts/test.sh -k resume).
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

scripts/setup.sh test
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
exec .venv/bin/python -m pytest -q --durations=10 "$@"
