"""Runs of train.py as real processes, to be killed, stopped and disturbed.

A `Run` forks one process per rank from a server that has already imported torch, so a start takes a tenth of a second.
A `LaunchedRun` starts the command that a user types, including torchrun.
"""

import contextlib
import importlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist
from conftest import TINY, command, environment, folders, fork, load, need_gpus, run_here
from ground import assert_same_state, metrics

from steadygpt.base.options import run_cli
from steadygpt.log.metrics import RUN

TIMEOUT_S = 240  # generous: a loaded machine must not fail a test
PORT_NUMBERS = itertools.count(100 * os.getpid())  # parallel test sessions start at different ports


class Run:
    """One start of train.py, or of another program, on `ranks` processes; its output goes to the file `out`.

    Args:
        tiny: flags placed before `flags`.
        faults: called with the rank in each rank's process, before main().
        one_gpu: all ranks use the first GPU; they communicate by gloo, because NCCL needs one GPU a rank.
    """

    def __init__(
        self,
        *flags: str,
        ranks: int = 1,
        faults: Sequence[Callable[[int], None]] = (),
        tiny: Sequence[str] = (*TINY, "--data_dir", "data"),
        program: str = "train",
        one_gpu: bool = False,
    ):
        need_gpus(1 if one_gpu else ranks)
        faults = [*faults, share_gpu] if one_gpu else faults
        self.out = Path(f"out-{time.monotonic_ns()}.txt")
        self.out.touch()
        environments = [{}]
        if ranks > 1:
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
            environments = [address | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(ranks)]
        self.ranks = [
            fork(run_program, program, [*tiny, *flags], environment, os.getcwd(), self.out, rank, faults)
            for rank, environment in enumerate(environments)
        ]

    def text(self) -> str:
        return self.out.read_text(errors="replace")

    def wait_for(self, pattern: str, timeout_s: float = TIMEOUT_S) -> str:
        """Wait until the output contains `pattern`; return the output."""
        deadline = time.monotonic() + timeout_s
        while True:
            alive = self.is_alive()  # asked before reading, so that the last lines of a dead process are read
            text = self.text()
            if re.search(pattern, text, re.MULTILINE):
                return text
            assert alive, f"ended without {pattern!r} in the output:\n{text}"
            assert time.monotonic() < deadline, f"no {pattern!r} in the output after {timeout_s} s:\n{text}"
            time.sleep(0.005)

    def is_alive(self) -> bool:
        return any(process.is_alive() for process in self.ranks)

    def signal(self, number: int, *ranks: int) -> None:
        """Send a signal to the given ranks, or to all ranks."""
        for rank in ranks or range(len(self.ranks)):
            with contextlib.suppress(ProcessLookupError):  # it may end on its own meanwhile
                if self.ranks[rank].is_alive():
                    os.kill(self.ranks[rank].pid, number)

    def kill(self) -> None:
        """Kill all ranks with SIGKILL."""
        self.signal(signal.SIGKILL)
        self.wait()

    def wait(self, timeout_s: float = TIMEOUT_S) -> list[int]:
        """Wait until all ranks have ended; return their exit statuses."""
        for process in self.ranks:
            process.join(timeout_s)
            if process.exitcode is None:
                self.signal(signal.SIGKILL)
                raise AssertionError(f"still running after {timeout_s} s:\n{self.text()}")
        return [process.exitcode for process in self.ranks]


class LaunchedRun:
    """One start of `python train.py` or of torchrun, as a user types it, with the methods of a Run.

    Args:
        agent: flags of torchrun.
    """

    def __init__(self, *flags: str, processes: int = 1, tiny=TINY, agent: Sequence[str] = ()):
        self.out = Path(f"out-{time.monotonic_ns()}.txt").resolve()
        with open(self.out, "w") as out:
            self.process = subprocess.Popen(
                command(*flags, processes=processes, tiny=tiny, agent=agent),
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment() | {"LAUNCHED": str(self.out)},
                start_new_session=True,
                preexec_fn=_restore_sighup,
            )

    text, wait_for = Run.text, Run.wait_for

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def workers(self) -> list[int]:
        """Return the process ids of torchrun's workers."""
        children = subprocess.run(["ps", "--ppid", str(self.process.pid), "-o", "pid="], capture_output=True, text=True)
        return [int(pid) for pid in children.stdout.split()]

    def group(self) -> list[int]:
        """Return the process ids of the run that are alive; torchrun starts its workers in separate sessions."""
        mark, found = f"LAUNCHED={self.out}".encode(), []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                found += [int(path.parent.name)] if mark in path.read_bytes().split(b"\0") else []
        return sorted(found)

    def kill(self) -> None:
        """Kill all processes with SIGKILL, workers first: when torchrun dies, they get a SIGTERM."""
        for pid in self.group()[::-1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait()
        self.wait_for_group()

    def wait(self, timeout_s: float = TIMEOUT_S) -> list[int]:
        return [self.process.wait(timeout_s)]

    def wait_for_group(self, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until all processes have ended: a killed worker of torchrun ends some time after the signal."""
        deadline = time.monotonic() + timeout_s
        while left := self.group():
            assert time.monotonic() < deadline, f"orphans: {left}"
            time.sleep(0.01)


def wait_for_files(run: Run, folder: Path, pattern: str, count: int) -> None:
    """Wait until `count` files of the folder match, or the run has ended."""
    while run.is_alive() and len(list(folder.glob(pattern))) < count:
        time.sleep(0.001)


def run_to_end(*flags: str, **options) -> str:
    """Run until the end, with exit status 0 on all ranks; return the output."""
    run = Run(*flags, **options)
    statuses = run.wait()
    assert set(statuses) == {0}, f"{statuses}\n{run.text()}"
    return run.text()


def error_line(*flags: str, **options) -> str:
    """Run a command that must exit with status 2 and one error line before its first step; return that line."""
    run = Run(*flags, **options)
    assert set(run.wait()) == {2}, run.text()
    errors = [line for line in run.text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, run.text()
    assert "Traceback" not in run.text()
    assert "| loss" not in run.text()
    return errors[0]


def assert_equals_reference(name: str, *measured: str) -> None:
    """Assert that the run in the folder `name` ended bitwise equal to the uninterrupted run in "reference"."""
    assert_same_state(load("reference/latest.pt"), load(f"{name}/latest.pt"))
    for key in measured or ("loss", "grad_norm"):
        assert metrics("reference", key) == metrics(f"{name}", key), key


def assert_resumes(name: str, *flags: str, ranks: int = 1, measured: Sequence[str] = ()) -> None:
    """Assert that the run in the folder `name` can be resumed, and then ends equal to the one in "reference"."""
    flags = (*flags, *folders(name), "--resume", "auto")
    if ranks == 1:
        assert run_here(*flags) == 0
    else:
        run_to_end(*flags, ranks=ranks)
    assert_equals_reference(name, *measured)


def run_program(
    program: str, argv: Sequence[str], environment: dict, cwd: str, out: Path, rank: int, faults: Sequence[Callable]
) -> None:
    """Run a program in this forked process; its output is appended to the file `out`, which exists."""
    _restore_sighup()
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


def share_gpu(rank: int) -> None:
    """Let all ranks of a Run use the first GPU, with gloo as the only backend."""
    init_process_group = dist.init_process_group

    def init_gloo(backend=None, device_id=None, **options) -> None:
        init_process_group("gloo", **options)

    os.environ["LOCAL_RANK"] = "0"
    dist.init_process_group = init_gloo


def _restore_sighup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores SIGHUP, and child processes would inherit that


def free_port() -> int:
    """Return a free port below the range from which the kernel assigns ports to other processes."""
    while True:
        port = 10_000 + next(PORT_NUMBERS) % 20_000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def continue_here(folder: Path) -> None:
    """Make the copy of a run's folder the same run, as if it had been restored there."""
    record = json.loads((folder / RUN).read_text())
    (folder / RUN).write_text(json.dumps(record | {"folder": str(folder.resolve())}))
