"""How long each span of time lasts: a fake clock says the unit of every option and of every wait.

A row of SPANS is a span, its seconds, and a function that begins it and returns whether it has passed.
"""

import re
import shlex
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import TINY
from ground import mock_log, open_log, write_checkpoint, writer_of

from steadygpt.base import retry
from steadygpt.config import FIELDS, TrainConfig, parse_args
from steadygpt.log import alerts, runlog
from steadygpt.log.metrics import read_status
from steadygpt.machine import ranks
from steadygpt.machine.ranks import Ranks, Requests, Stopped
from steadygpt.mirror import uploads
from steadygpt.mirror.uploads import Uploads
from steadygpt.monitor import snapshot
from steadygpt.run.step import cost

CPU = Ranks(torch.device("cpu"))


class Clock:
    """The module time, whose time goes on only when a test or a sleep says so."""

    def __init__(self):
        self.now_s = 1e9

    def monotonic(self) -> float:
        return self.now_s

    time = perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """The clock of all modules in the table."""
    clock = Clock()
    for module in (ranks, runlog, snapshot, uploads):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr("steadygpt.checkpoint.writer.time", clock)
    for module in (alerts, retry):
        monkeypatch.setattr(module, "monotonic", clock.monotonic)
    monkeypatch.setattr(retry, "sleep", clock.sleep)
    monkeypatch.setattr(ranks, "process_age_s", lambda: 0.0)
    return clock


def config_of(flags: str = "") -> TrainConfig:
    return parse_args([*TINY, *shlex.split(flags)])[0]


# ---------------------------------------------------------------------------------------------------------------------
# Options. Each function begins a span and returns whether it has passed. They run in an empty working directory.


def max_hours(clock: Clock) -> Callable[[], bool]:
    requests = Requests(CPU, config_of("--max_hours 2").max_hours)

    def passed() -> bool:
        try:
            requests.agree()
        except Stopped as stopped:
            return stopped.reason == "max_hours"
        return False

    return passed


def checkpoint_minutes(clock: Clock) -> Callable[[], bool]:
    return writer_of(config_of("--checkpoint_minutes 3"), mock_log("checkpoints")).is_due


def failing_saves(clock: Clock) -> Callable[[], bool]:
    """A run stops after ten failed saves and ten intervals without a good one."""
    writer = writer_of(config_of("--checkpoint_minutes 3"), mock_log("checkpoints"))
    writer.failed = 10
    return lambda: writer.reason_to_stop() == "saves failed"


def timeout_minutes(clock: Clock) -> Callable[[], bool]:
    """PyTorch has the clock: what counts is the time-out that it is given."""
    begun_s = clock.now_s
    given: list[timedelta] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "launched_as", lambda: (0, 2))
        patch.setattr(dist, "init_process_group", lambda *_, timeout, **__: given.append(timeout))
        with ranks.joined("cpu", config_of("--timeout_minutes 7").timeout_minutes):
            pass
    [timeout] = given
    return lambda: clock.now_s - begun_s > timeout.total_seconds()


def gpu_hour_cost(clock: Clock) -> Callable[[], bool]:
    """The time for which two GPUs at 3 per hour cost 12."""
    begun_s = clock.now_s
    run = SimpleNamespace(config=config_of("--gpu_hour_cost 3"), ranks=Ranks(torch.device("cpu"), world_size=2))
    return lambda: cost(run, clock.now_s - begun_s) > 12


OPTIONS = [
    ("--max_hours 2", max_hours, 2 * 3600),
    ("--checkpoint_minutes 3", checkpoint_minutes, 3 * 60),
    ("--checkpoint_minutes 3, where saves fail", failing_saves, 10 * 3 * 60),
    ("--timeout_minutes 7", timeout_minutes, 7 * 60),
    ("--gpu_hour_cost 3", gpu_hour_cost, 2 * 3600),
]

# ---------------------------------------------------------------------------------------------------------------------
# Waits that no option sets.


def heartbeat(clock: Clock) -> Callable[[], bool]:
    log = open_log(config_of(), None)
    log.status("running")

    def passed() -> bool:
        log.note(step=round(clock.now_s))
        log.beat()
        return read_status(Path("checkpoints"))["step"] == round(clock.now_s)

    return passed


def repeated_alert(clock: Clock) -> Callable[[], bool]:
    sender = alerts.Alerts.__new__(alerts.Alerts)  # without its thread
    sender.prefix, sender.sent_at_s, sent = "", {}, []
    sender.messages = SimpleNamespace(put=sent.append)
    sender.send("spike", "first")

    def passed() -> bool:
        sender.send("spike", "again")
        return len(sent) == 2

    return passed


def uploads_of(**changes) -> Uploads:
    """Return uploads without their thread."""
    made = Uploads.__new__(Uploads)
    vars(made).update(
        config=config_of(), is_last=False, corrupt=set(), thread=SimpleNamespace(is_alive=lambda: True),
        requests=SimpleNamespace(unfinished_tasks=1), **changes,
    )  # fmt: skip
    return made


def upload_of_a_timed_save(clock: Clock) -> Callable[[], bool]:
    log = mock_log("checkpoints")
    write_checkpoint(Path(log.folder_lock.name).parent, 3, "latest.pt")
    made = uploads_of(uploaded_at_s=clock.now_s)
    return lambda: bool(made._newest_missing({}))


def failing_uploads(clock: Clock) -> Callable[[], bool]:
    made = uploads_of(failing_since_s=clock.now_s)
    return lambda: not made.is_busy()


def retries(answered: bool, clock: Clock) -> Callable[[], bool]:
    """The time after which a request without an answer ends."""
    begun_s = clock.now_s
    service = retry.Service(lambda task, error: error)
    service.answered = answered

    def gone():
        raise ConnectionError("gone")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(retry.NoAnswer):
        patch.setattr(retry, "LONGEST_PAUSE_S", 1.0)
        service.persistently("a request", gone)
    ended_s = clock.now_s
    clock.now_s = begun_s
    return lambda: clock.now_s >= ended_s


def hung(doing: str, step_ms: float, clock: Clock) -> Callable[[], bool]:
    """The time without a heartbeat after which the monitor says that a run hangs."""
    Path("run").mkdir()
    status = {"status": "running", "doing": doing, "step_ms": step_ms, "updated_at": clock.now_s, "host": "elsewhere"}
    return lambda: snapshot.state_of(snapshot.Snapshot.take(Path("run"), status)).name == "hung"


WAITS = [
    ("a heartbeat", heartbeat, 10),
    ("an alert of the same event", repeated_alert, 10 * 60),
    ("an upload of a timed save", upload_of_a_timed_save, 10 * 60),
    ("uploads that fail at the end of a run", failing_uploads, 10 * 60),
    ("retries of a service that has answered", partial(retries, True), 25 * 60),
    ("retries where there may be no network", partial(retries, False), 6),
    ("a run that hangs", partial(hung, "training", 400), 60),
    ("a run with slow steps that hangs", partial(hung, "training", 40_000), 5 * 40),
    ("a run that compiles and hangs", partial(hung, "starting", 400), 15 * 60),
]


@pytest.mark.parametrize(("begin", "seconds"), [pytest.param(*row, id=span) for span, *row in OPTIONS + WAITS])
def test_a_span_has_passed_after_its_seconds_and_not_before(clock, begin, seconds):
    passed = begin(clock)
    begun_s = clock.now_s
    for share, expected in ((0.1, False), (0.95, False), (1.05, True)):
        clock.now_s = begun_s + share * seconds
        assert passed() == expected, f"after {share * seconds:g} of {seconds} s"


def test_each_option_that_is_a_time_has_a_row():
    rows = " ".join(flags for flags, *_ in OPTIONS)
    assert all(f"--{name} " in rows for name in FIELDS if re.search("hour|minute|second", name))
