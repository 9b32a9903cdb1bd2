"""A pytest plugin that writes each test's outcome as a line of JSON to the file named by GPU_SUITE_OUTCOMES.

A line is written when a test starts and when it ends, so the test that hangs is known although pytest is killed.
"""

import json
import os

import pytest


def _write(**line) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:  # the process that starts the workers gets their reports
        with open(os.environ["GPU_SUITE_OUTCOMES"], "a") as file:
            file.write(json.dumps(line) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(name=nodeid, outcome="did not end")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    reason = ""
    if report.skipped:
        reason = str(report.longrepr[2]).removeprefix("Skipped: ")
    elif report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = crash.message if crash else str(report.longrepr)
    if report.when == "call" or report.outcome != "passed":
        first_line = next(iter(reason.splitlines()), "")[:300]
        _write(name=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 2), reason=first_line)
