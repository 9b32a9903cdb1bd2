"""A pytest plugin (-p record) that writes how a session's tests went into the table of docs/RELIABILITY.md."""

import collections
import os
import platform
import re
import time
from pathlib import Path

import torch

TABLE = Path(__file__).resolve().parent.parent.parent / "docs" / "RELIABILITY.md"
TEST = re.compile(r"`(test_\w+\.py::test_\w+)`")

outcomes: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
notes: dict[str, list[str]] = collections.defaultdict(list)
begun_s = time.monotonic()


def pytest_runtest_logreport(report):
    test = re.sub(r"^.*/|\[.*", "", report.nodeid)
    if report.when == "call" or report.outcome != "passed":
        outcomes[test][report.outcome] += 1
    if report.when == "call":
        notes[test] += [f"{value} {name}" for name, value in report.user_properties]


def pytest_sessionfinish():
    rows = TABLE.read_text().splitlines()
    complete = outcomes.keys() >= set(TEST.findall(TABLE.read_text()))
    for number, row in enumerate(rows):
        ran = [test for test in TEST.findall(row) if test in outcomes]
        if row.startswith("|") and ran:
            total = sum((outcomes[test] for test in ran), collections.Counter())
            result = ", ".join(f"{count} {outcome}" for outcome, count in sorted(total.items()))
            *cells, _, _ = row.split("|")
            rows[number] = "|".join([*cells, f" {'; '.join([result, *(n for test in ran for n in notes[test])])} ", ""])
        if row.startswith("Last run of all of it: ") and complete:
            total = sum(outcomes.values(), collections.Counter())
            result = ", ".join(f"{count} {outcome}" for outcome, count in sorted(total.items()))
            rows[number] = (
                f"Last run of all of it: {time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {platform.system()}, "
                f"Python {platform.python_version()}, torch {torch.__version__}: {result} in "
                f"{(time.monotonic() - begun_s) / 60:.0f} minutes."
            )
    TABLE.write_text("\n".join(rows) + "\n")
