"""A pytest plugin (-p record) that chooses the tests of the fault storm: those that docs/RELIABILITY.md names, and
those that nothing else runs. It writes their results into the page: the outcomes into the last cell of row N of the
tables, and what the tests counted, such as kills, behind their names in item N of the list of tests.
"""

import collections
import os
import platform
import re
import time
from importlib import metadata
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "RELIABILITY.md"
TEST = re.compile(r"`(test_\w+\.py::test_\w+)`")
ROW = re.compile(r"\| (\d+)\. ")
ITEM = re.compile(r"(\d+)\. (`test_\w+\.py::test_\w+`(?: `test_\w+\.py::test_\w+`)*)")

outcomes: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
# test -> noun -> sum over the cases of the test
counts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
started_s = time.monotonic()


def name_of(nodeid: str) -> str:
    """Return the name that the page has for a test, which has no folder and no case."""
    return re.sub(r"^.*/|\[.*", "", nodeid)


def pytest_collection_modifyitems(config, items):
    named = set(TEST.findall(PAGE.read_text()))
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
    PAGE.write_text(with_results(PAGE.read_text()))


def with_results(page: str) -> str:
    """Return the page with the results of the tests that ran."""
    lines = page.splitlines()
    items = {int(item[1]): (at, item[2]) for at, line in enumerate(lines) if (item := ITEM.match(line))}
    is_complete = outcomes.keys() >= set(TEST.findall(page))
    for at, line in enumerate(lines):
        row = ROW.match(line)
        if row and int(row[1]) in items:
            at_item, names = items[int(row[1])]
            if ran := [test for test in TEST.findall(names) if test in outcomes]:
                lines[at] = "|".join([*line.split("|")[:-2], f" {summary(outcomes[test] for test in ran)} ", ""])
                sums = sum((counts[test] for test in ran), collections.Counter())
                counted = "; ".join(f"{count:,} {noun}" for noun, count in sums.items())
                lines[at_item] = f"{row[1]}. {names}" + (f": {counted}" if counted else "")
        if line.startswith("Last complete run: ") and is_complete:
            lines[at] = (
                f"Last complete run: {time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {platform.system()}, "
                f"Python {platform.python_version()}, torch {metadata.version('torch')}: "
                f"{summary(outcomes.values())} in {(time.monotonic() - started_s) / 60:.0f} minutes."
            )
    return "\n".join(lines) + "\n"


def summary(counters) -> str:
    total = sum(counters, collections.Counter())
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(total.items()))
