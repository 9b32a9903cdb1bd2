"""A pytest plugin (-p record) that chooses the tests of the fault storm: those that the table of docs/RELIABILITY.md
names, and those that nothing else runs. It writes their results into the table.
"""

import collections
import os
import platform
import re
import time
from importlib import metadata
from pathlib import Path

TABLE = Path(__file__).resolve().parent.parent.parent / "docs" / "RELIABILITY.md"
TEST = re.compile(r"`(test_\w+\.py::test_\w+)`")

outcomes: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
# test -> noun -> sum over the cases of the test
counts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
started_s = time.monotonic()


def name_of(nodeid: str) -> str:
    """Return the name that the table has for a test, which has no folder and no case."""
    return re.sub(r"^.*/|\[.*", "", nodeid)


def pytest_collection_modifyitems(config, items):
    named = set(TEST.findall(TABLE.read_text()))
    kept, others = [], []
    for item in items:
        is_chosen = item.get_closest_marker("storm") or name_of(item.nodeid) in named
        (kept if is_chosen else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = kept


def pytest_runtest_logreport(report):
    test = name_of(report.nodeid)
    if report.when == "call" or report.outcome != "passed":
        outcomes[test][report.outcome] += 1
    if report.when == "call":
        counts[test].update(dict(report.user_properties))


def pytest_sessionfinish(session):
    if hasattr(session.config, "workerinput"):
        return  # a worker of pytest-xdist sees only its share of the reports; the controller sees all
    rows = TABLE.read_text().splitlines()
    named = set(TEST.findall(TABLE.read_text()))
    complete = outcomes.keys() >= named
    for number, row in enumerate(rows):
        ran = [test for test in TEST.findall(row) if test in outcomes]
        if row.startswith("|") and ran:
            *cells, _, _ = row.split("|")
            sums = sum((counts[test] for test in ran), collections.Counter())
            results = [summary(outcomes[test] for test in ran), *(f"{count:,} {noun}" for noun, count in sums.items())]
            rows[number] = "|".join([*cells, f" {'; '.join(results)} ", ""])
        if row.startswith("Last complete run: ") and complete:
            rows[number] = (
                f"Last complete run: {time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {platform.system()}, "
                f"Python {platform.python_version()}, torch {metadata.version('torch')}: "
                f"{summary(outcomes.values())} in {(time.monotonic() - started_s) / 60:.0f} minutes."
            )
    TABLE.write_text("\n".join(rows) + "\n")


def summary(counters) -> str:
    total = sum(counters, collections.Counter())
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(total.items()))
