"""A pytest plugin (-p record) that chooses the tests of the fault storm: those in rows.toml, which belong to the rows
of the tables in docs/RELIABILITY.md, and those that nothing else runs. It writes their outcomes, and what they counted,
such as kills, into the last cell of their row.
"""

import collections
import os
import platform
import re
import time
import tomllib
from importlib import metadata
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "RELIABILITY.md"
ROW = re.compile(r"\| (\d+)\. ")

# row -> its tests, as file.py::test
ROWS: dict[int, list[str]] = {
    int(row): tests for row, tests in tomllib.loads((Path(__file__).parent / "rows.toml").read_text()).items()
}
outcomes: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
# test -> noun -> sum over the cases of the test
counts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
# test -> its cases, also those that -k leaves out
cases: collections.Counter = collections.Counter()
# The tests of which the command line names single cases.
incomplete: set[str] = set()
started_s = time.monotonic()


def name_of(nodeid: str) -> str:
    """Return the name that rows.toml has for a test, which has no folder and no case."""
    return re.sub(r"^.*/|\[.*", "", nodeid)


def pytest_collection_modifyitems(config, items):
    cases.update(name_of(item.nodeid) for item in items)
    incomplete.update(name_of(argument) for argument in config.args if "[" in argument)
    of_rows = {test for tests in ROWS.values() for test in tests}
    kept, others = [], []
    for item in items:
        is_chosen = item.get_closest_marker("storm") or name_of(item.nodeid) in of_rows
        (kept if is_chosen else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = kept


def pytest_deselected(items):
    cases.update(name_of(item.nodeid) for item in items)


def pytest_runtest_logreport(report):
    test = name_of(report.nodeid)
    if report.when == "call" or report.outcome != "passed":
        outcomes[test][report.outcome] += 1
    if report.when == "call":
        counts[test].update(dict(report.user_properties))


def pytest_sessionfinish(session):
    if hasattr(session.config, "workerinput"):
        return  # a worker of pytest-xdist runs only its share of the tests
    PAGE.write_text(with_results(PAGE.read_text(), ROWS))


def with_results(page: str, rows: dict[int, list[str]]) -> str:
    """Return the page with the results of the rows whose tests all ran; a * marks rows of a run that lacks others."""
    # The controller of pytest-xdist collects nothing: it knows no cases, so no test is done there.
    done = {test for test, ran in outcomes.items() if 0 < cases[test] <= ran.total() and test not in incomplete}
    tested = {row for row, tests in rows.items() if tests}
    complete = {row for row in tested if done.issuperset(rows[row])}
    is_whole = complete == tested
    lines = page.splitlines()
    for at, line in enumerate(lines):
        row = ROW.match(line)
        if row and int(row[1]) in complete:
            result = result_of(rows[int(row[1])])
            if not is_whole:
                result += " *"
            lines[at] = "|".join([*line.split("|")[:-2], f" {result} ", ""])
        if line.startswith("Last complete run: ") and is_whole:
            lines[at] = (
                f"Last complete run: {time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {platform.system()}, "
                f"Python {platform.python_version()}, torch {metadata.version('torch')}: "
                f"{summary(outcomes)} in {(time.monotonic() - started_s) / 60:.0f} minutes."
            )
    return "\n".join(lines) + "\n"


def result_of(tests: list[str]) -> str:
    """Return the outcomes of the tests, and what they counted: 2 passed (20 kills)."""
    sums = sum((counts[test] for test in tests), collections.Counter())
    result = summary(tests)
    if sums:
        result += f" ({', '.join(f'{count:,} {noun}' for noun, count in sums.items())})"
    return result


def summary(tests) -> str:
    total = sum((outcomes[test] for test in tests), collections.Counter())
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(total.items()))
