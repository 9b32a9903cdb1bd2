#!/usr/bin/env bash
# Run every test of tests/faults/rows.toml on the CPU, and all others that are slow, and write the results into it.
# The tests run one at a time, since many of them depend on timing. As root it also mounts a small disk and fills it.
# Further arguments go to pytest: scripts/fault_storm.sh -k kill
set -euo pipefail
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/common.sh"
cd "$repo"

scripts/setup.sh test
PYTHONPATH=tests/faults exec .venv/bin/python -m pytest -m "storm or not storm" -p record -v --durations=10 "$@"
