"""Runs of train.py that tests kill, stop and disturb.

A `Life` is one start of a run: real processes, one a rank, each with a fork of a server that has imported torch
already, so that a start takes a tenth of a second. Tests that need torchrun itself start it (conftest.command).
"""

import contextlib
import importlib
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from conftest import TINY, assert_same_state, command, environment, load, metrics

from steadygpt.cli import run_cli

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    "pytest train prepare_dataset torch._dynamo torch.distributed.checkpoint.state_dict".split()
)


class Life:
    """One start of train.py, or of another program, on `ranks` processes; leaves its output in `out`.

    Args:
        tiny: flags that stand before the others.
        faults: called in each rank before main(), with its rank.
    """

    def __init__(
        self,
        *flags: str,
        ranks: int = 1,
        faults: Sequence[Callable[[int], None]] = (),
        tiny: Sequence[str] = (*TINY, "--data_dir", "data"),
        program: str = "train",
    ):
        self.out = Path(f"out-{time.monotonic_ns()}.txt")
        self.out.touch()
        environments = [{}]
        if ranks > 1:
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
            environments = [address | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(ranks)]
        self.ranks = [
            FORKS.Process(
                target=_rank, args=(program, [*tiny, *flags], environment, os.getcwd(), self.out, rank, faults)
            )
            for rank, environment in enumerate(environments)
        ]
        for process in self.ranks:
            process.start()

    def text(self) -> str:
        return self.out.read_text(errors="replace")

    def wait_for(self, pattern: str, timeout_s: float = 60) -> str:
        """Wait until a line with `pattern` is in the output; returns the output."""
        deadline = time.monotonic() + timeout_s
        while True:
            alive = self.is_alive()  # before it is read: its last words count
            text = self.text()
            if re.search(pattern, text, re.MULTILINE):
                return text
            assert alive and time.monotonic() < deadline, f"no {pattern!r} in the output:\n{text}"
            time.sleep(0.002)

    def is_alive(self) -> bool:
        return any(process.is_alive() for process in self.ranks)

    def signal(self, number: int, *ranks: int) -> None:
        """Send a signal to some ranks; to all, when none is named."""
        for rank in ranks or range(len(self.ranks)):
            if self.ranks[rank].is_alive():
                os.kill(self.ranks[rank].pid, number)

    def kill(self) -> None:
        """kill -9 of the whole group."""
        self.signal(signal.SIGKILL)
        self.wait()

    def wait(self, timeout_s: float = 60) -> list[int]:
        """Wait for the end of all ranks; returns their exit statuses."""
        for process in self.ranks:
            process.join(timeout_s)
            if process.exitcode is None:
                self.signal(signal.SIGKILL)
                raise AssertionError(f"still running after {timeout_s} s:\n{self.text()}")
        return [process.exitcode for process in self.ranks]


def folders(name: str) -> tuple[str, ...]:
    """The flags that put a run into a folder of its own."""
    return "--checkpoint_dir", f"{name}/ckpt", "--logdir", f"{name}/logs"


def assert_continued(name: str, *measured: str) -> None:
    """The run in the folder `name` came, bit by bit, to what the uninterrupted one in "whole" came to."""
    assert_same_state(load("whole/ckpt/latest.pt"), load(f"{name}/ckpt/latest.pt"))
    for key in measured or ("loss", "grad_norm"):
        assert metrics("whole/logs", key) == metrics(f"{name}/logs", key), key


class Launched:
    """One start of train.py, or of torchrun with it, as a user types it; otherwise like a Life."""

    def __init__(self, *flags: str, processes: int = 1, tiny=TINY):
        self.out = Path(f"out-{time.monotonic_ns()}.txt")
        with open(self.out, "w") as out:
            self.process = subprocess.Popen(
                command(*flags, processes=processes, tiny=tiny),
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment() | {"LAUNCHED": str(self.out)},
                start_new_session=True,
                preexec_fn=_as_from_a_terminal,
            )

    text, wait_for = Life.text, Life.wait_for

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def workers(self) -> list[int]:
        """The process ids of torchrun's workers."""
        children = subprocess.run(["ps", "--ppid", str(self.process.pid), "-o", "pid="], capture_output=True, text=True)
        return [int(pid) for pid in children.stdout.split()]

    def group(self) -> list[int]:
        """The process ids of all that is alive of it; torchrun's workers are in sessions of their own."""
        mark, found = f"LAUNCHED={self.out}".encode(), []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                found += [int(path.parent.name)] if mark in path.read_bytes().split(b"\0") else []
        return sorted(found)

    def kill(self) -> None:
        """kill -9 of all of it, workers first: torchrun's death would be a SIGTERM to them."""
        for pid in self.group()[::-1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait()
        assert not self.group()

    def wait(self, timeout_s: float = 120) -> list[int]:
        return [self.process.wait(timeout_s)]


def whole_life(*flags: str, **options) -> str:
    """Run to the end, which must be a good one; returns the output."""
    life = Life(*flags, **options)
    statuses = life.wait()
    assert set(statuses) == {0}, f"{statuses}\n{life.text()}"
    return life.text()


def refused(*flags: str, **options) -> str:
    """Run what must end with status 2, before any step, and one line on stderr, which is returned."""
    life = Life(*flags, **options)
    assert set(life.wait()) == {2}, life.text()
    errors = [line for line in life.text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in life.text() and "| loss" not in life.text(), life.text()
    return errors[0]


def _rank(
    program: str, argv: list[str], environment: dict, cwd: str, out: Path, rank: int, faults: Sequence[Callable]
) -> None:
    _as_from_a_terminal()
    os.chdir(cwd)
    os.environ.update(environment)
    descriptor = os.open(out, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    sys.argv = [f"{program}.py", *argv]
    for fault in faults:
        fault(rank)
    run_cli(importlib.import_module(program).main)


def _as_from_a_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # though the tests may have been started with nohup


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
