#!/usr/bin/env bash
# Run every test of docs/RELIABILITY.md on the CPU, including the slow ones, and write the results into its table.
# The tests run one at a time, since many of them depend on timing. As root it also mounts a small disk and fills it.
# Further arguments go to pytest: scripts/fault_storm.sh -k kill
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

scripts/setup.sh test
PYTHONPATH=tests/faults exec .venv/bin/python -m pytest tests/faults tests/test_refused.py tests/test_nodes.py tests/checkpoint/test_mirror.py tests/checkpoint/test_saves.py tests/checkpoint/test_files.py tests/test_prepare_dataset.py tests/test_prepare_stores.py tests/test_other_trainers.py tests/test_deterministic.py tests/machine/test_on_device.py tests/run/test_repeats.py tests/run/test_identity.py tests/test_doc_commands.py tests/test_benchmarks.py -m "storm or not storm" -p record -v --durations=10 "$@"
