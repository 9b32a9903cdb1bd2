"""A pytest plugin (-p record) that chooses the tests of the fault storm: those of the faults in rows.toml, and those
that nothing else runs. It writes their outcomes, and what they counted, such as kills, into their row, and the outcome
of a complete run into docs/RELIABILITY.md.
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
FAULTS = Path(__file__).with_name("rows.toml")

# row -> its tests, as file.py::test
ROWS: dict[str, list[str]] = {row: fault["tests"] for row, fault in tomllib.loads(FAULTS.read_text()).items()}
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
    rows, is_whole = with_results(FAULTS.read_text(), ROWS)
    FAULTS.write_text(rows)
    if is_whole:
        PAGE.write_text(with_last_run(PAGE.read_text()))


def with_results(text: str, rows: dict[str, list[str]]) -> tuple[str, bool]:
    """Return rows.toml with the results of the rows whose tests all ran, and whether these are all rows.

    A * marks results of a run that lacks other rows.
    """
    # The controller of pytest-xdist collects nothing: it knows no cases, so no test is done there.
    done = {test for test, ran in outcomes.items() if 0 < cases[test] <= ran.total() and test not in incomplete}
    complete = {row for row, tests in rows.items() if done.issuperset(tests)}
    is_whole = complete == {*rows}
    mark = "" if is_whole else " *"
    for row in complete:
        result = rf'\g<1>result = "{result_of(rows[row])}{mark}"'
        text = re.sub(rf'^(\[{row}\]\n(?:.+\n)*?)result = ".*"$', result, text, flags=re.MULTILINE)
    return text, is_whole


def with_last_run(page: str) -> str:
    where = f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
    minutes = (time.monotonic() - started_s) / 60
    run = (
        f"Last complete run: {time.strftime('%Y-%m-%d')}, {where}, torch {metadata.version('torch')}: "
        f"{summary(outcomes)} in {minutes:.0f} minutes."
    )
    return re.sub(r"^Last complete run: .*$", run, page, flags=re.MULTILINE)


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
