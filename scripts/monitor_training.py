#!/usr/bin/env python
"""Watch a run in the terminal: whether it is alive, its progress, curves, speed, cost, GPUs and disk.

scripts/monitor_training.py                               # the run in checkpoints/
scripts/monitor_training.py checkpoints/quickstart
scripts/monitor_training.py me@gpu-host:project/checkpoints
scripts/monitor_training.py --once || echo "not well"     # one view; for cron and scripts
"""

import json
import os
import queue
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from steadygpt import watch
from steadygpt.cli import UserError, option, parse_options, run_cli
from steadygpt.liveness import State, state_of
from steadygpt.units import duration_text

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0  # before the monitor connects again
SILENCE_S = 15.0  # without a snapshot for this long, or 5 intervals, the connection counts as lost
COLUMNS, LINES = 100, 40  # of a view that is not printed on a terminal


@dataclass(frozen=True)
class MonitorOptions:
    """The options of monitor_training.py."""

    run: str = option("checkpoints", "folder of a run's checkpoints, here or USER@HOST:FOLDER", positional=True)
    once: bool = option(False, "print one view; exit with 0 if the run is well, with 1 if it failed, hangs or is gone")
    interval_s: float = option(2.0, "seconds between two looks at the run", at_least=0.1)
    ssh: str = option("ssh", "command that connects, such as 'ssh -p 2222 -i KEY'")


class Feed:
    """What is known of a run, from a process that watches it here or through ssh, and is started again if it ends.

    snapshot: the last one
    curves: their points so far, thinned
    problem: why there is no connection now; "" if there is one
    """

    def __init__(self, options: MonitorOptions):
        host, colon, folder = options.run.partition(":")
        if colon and "/" not in host and not Path(options.run).exists():
            folder = shlex.quote(folder or MonitorOptions.run)
            self.command = [*shlex.split(options.ssh), host, f"python3 -I - {folder} {options.interval_s}"]
        else:
            self.command = [sys.executable, "-I", "-", options.run, str(options.interval_s)]
        self.silence_s = max(SILENCE_S, 5 * options.interval_s)
        self.snapshot: dict[str, Any] = {}
        self.curves: dict[str, list] = {name: [] for name in watch.CURVES}
        self.problem = ""
        self.heard_s = self.started_s = time.monotonic()
        self.process: subprocess.Popen | None = None
        self.arrived: queue.Queue[dict | str] = queue.Queue()  # snapshots and problems
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        pause_s, is_first = FIRST_PAUSE_S, True
        while True:
            self.started_s = time.monotonic()
            with open(watch.__file__) as source, tempfile.TemporaryFile("w+", errors="replace") as errors:
                try:
                    # The first ssh may ask for a password. Later ones have no terminal to ask on, because a question
                    # would spoil the view.
                    process = subprocess.Popen(
                        self.command,
                        stdin=source,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        start_new_session=not is_first,
                    )
                except OSError as error:
                    self.arrived.put(f"{self.command[0]}: cannot be started ({error.strerror})")
                    return
                self.process = process
                for line in process.stdout or ():
                    if line.startswith(b"{"):  # and is not printed by a login script
                        self.arrived.put(json.loads(line))
                        pause_s, is_first = FIRST_PAUSE_S, False
                status = process.wait()
                errors.seek(0)
                said = errors.read().strip().splitlines() or [f"{self.command[0]} ended with status {status}"]
            self.arrived.put(said[-1])
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def read(self, wait: bool = False) -> None:
        """Take in what has arrived.

        Args:
            wait: for a first snapshot.

        Raises: UserError when a first snapshot does not come.
        """
        while wait or not self.arrived.empty():
            arrived, wait = self.arrived.get(), False
            if isinstance(arrived, str):
                self.problem = arrived
                continue
            self.snapshot, self.problem, self.heard_s = arrived, "", time.monotonic()
            for name, points in arrived["points"].items():
                self.curves[name] = watch.thin(points if arrived["reset"] else self.curves[name] + points)
        if not self.snapshot:
            raise UserError(self.problem)
        # The first snapshot may take long, because it has all of the logs.
        if self.heard_s > self.started_s and time.monotonic() - self.heard_s > self.silence_s:
            self.close()  # _run() connects again

    def close(self) -> None:
        if self.process:
            self.process.kill()


def state_now(feed: Feed) -> tuple[dict[str, Any], State]:
    """Return the last snapshot with the ages of now, and the state of the run."""
    snapshot, state = feed.snapshot, state_of(feed.snapshot)
    silent_s = time.monotonic() - feed.heard_s
    ages = {key: age_s + silent_s for key, age_s in snapshot.items() if key.endswith("_age_s") and age_s is not None}
    if feed.problem:
        why = f"no connection for {duration_text(silent_s)}; last seen {state.name}. {feed.problem}"
        state = State("not reachable", why)
    return snapshot | ages, state


@contextmanager
def keyboard() -> Iterator[Callable[[float], bytes]]:
    """Yield a function that waits for a key at most so many seconds, and returns it, or none."""
    terminal = [sys.stdin.fileno()] if sys.stdin.isatty() else []
    before = [termios.tcgetattr(fd) for fd in terminal]
    try:
        for fd in terminal:
            tty.setcbreak(fd)
            mode = termios.tcgetattr(fd)
            mode[3] &= ~termios.ISIG  # Ctrl-C is a key: an exception in the middle of drawing would spoil the terminal
            termios.tcsetattr(fd, termios.TCSADRAIN, mode)
        yield lambda seconds: b"".join(os.read(fd, 1) for fd in select.select(terminal, [], [], seconds)[0])
    finally:
        for fd, attributes in zip(terminal, before, strict=True):
            termios.tcsetattr(fd, termios.TCSADRAIN, attributes)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(MonitorOptions, argv, __doc__.splitlines()[0])
    try:
        from monitor_view import view
        from rich.console import Console, ConsoleDimensions, Group
        from rich.live import Live
    except ImportError:
        raise UserError("rich is not installed; pip install rich") from None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # restores the terminal
    console = Console(highlight=False)
    with closing(Feed(options)) as feed:
        feed.read(wait=True)
        if options.once or not console.is_terminal:
            if not console.is_terminal:
                console.size = ConsoleDimensions(COLUMNS, LINES)
            snapshot, state = state_now(feed)
            console.print(*view(snapshot, feed.curves, state, *console.size), sep="\n")
            return 0 if state.is_well else 1
        with (
            suppress(KeyboardInterrupt),
            keyboard() as key,
            Live(screen=True, auto_refresh=False, console=console) as live,
        ):
            pressed = b""
            while pressed not in (b"q", b"Q", b"\x03"):
                feed.read()
                snapshot, state = state_now(feed)
                lines = view(snapshot, feed.curves, state, *console.size, "q closes the monitor")
                live.update(Group(*lines), refresh=True)
                pressed = key(1.0)
    return 0


if __name__ == "__main__":
    run_cli(main)
