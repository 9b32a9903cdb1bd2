#!/usr/bin/env bash
# Every fault of docs/RELIABILITY.md, also what takes minutes, on the CPU; writes the results into its table.
# As root it also mounts a small disk to fill it. Further arguments go to pytest: scripts/fault_storm.sh -k kill
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

scripts/setup.sh test
PYTHONPATH=tests/faults exec .venv/bin/python -m pytest tests/faults -m "storm or not storm" -p record -v --durations=10 "$@"
