"""Snapshots of the runs in a folder, taken from their files and processes, and whether they are alive."""

import math
import os
import re
import shlex
import socket
import stat
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from steadygpt.base.options import UserError
from steadygpt.base.text import counted, duration_text
from steadygpt.base.typed import read_json
from steadygpt.log.metrics import METRICS, STATUS, Status, read_status

FRESH_S = 15.0  # a run renews its heartbeat at least every 10 s
SILENT_S = 60.0  # without a heartbeat for this long, and for SILENT_STEPS steps, a run hangs
SILENT_STEPS = 5
COMPILING_S = 900.0  # in place of SILENT_S at the start and in evaluations: compiling the model renews no heartbeat
HEALTHY = ("running", "stopped", "finished")  # states

LONGEST_LINE = 2**20  # bytes; SteadyGPT writes no longer ones
MAX_POINTS = 1000  # of a curve, more than a terminal has columns
Curve = list[tuple[int, float]]  # points (step, value) in the order of the steps
# The beginning of a line of metrics.jsonl: a training or validation loss, or the first step of a launch. The rest is
# not parsed, so that a log of months is shown in seconds.
POINT = re.compile(
    rb'\{"step": (\d{1,18}), "time": [\d.]+, "(loss|val_loss|first_step)": (\d{1,18}(?:\.\d+)?(?:e[+-]\d{1,3})?)[,}]'
)


@dataclass
class Snapshot:
    """The state of a run at one moment, from its files and its process."""

    folder: Path
    status: Status
    process: str  # exists, suspended, gone, hidden, or elsewhere: on another machine
    heartbeat_age_s: float  # since status.json was renewed
    saved_at: float | None  # when the last save was written; None: there was none
    curves: dict[str, Curve] = field(default_factory=dict)  # loss and val_loss
    # Runs beside or below this one, without curves, by folder.
    other_runs: dict[str, "Snapshot"] = field(default_factory=dict)

    @classmethod
    def take(cls, folder: Path, status: Status, heartbeat_s: float, **fields: Any) -> "Snapshot":
        """Look at the process and the checkpoints of a run whose status.json was renewed at `heartbeat_s`.

        Args:
            fields: the other fields of the snapshot.
        """
        latest = folder / "latest.pt"
        is_on_this_machine = status.get("host", socket.gethostname()) == socket.gethostname()
        return cls(
            folder=folder,
            status=status,
            process=process_state(folder, status.get("pid"), heartbeat_s) if is_on_this_machine else "elsewhere",
            heartbeat_age_s=max(0.0, time.time() - heartbeat_s),
            saved_at=latest.stat().st_mtime if latest.exists() else None,
            **fields,
        )


def watch(run_folder: str) -> Iterator[Snapshot]:
    """Yield a snapshot of the run in a folder, or else of the newest one below it, whenever the next is asked for."""
    top = Path(run_folder).expanduser()
    folder = find_runs(top)[0]
    path = folder / STATUS
    curves = Curves(folder / METRICS)
    read = partial(read_json, path, Status, "a run that is alive writes this file again within seconds")
    status: Status = read()
    heartbeat_s = status.get("updated_at") or path.stat().st_mtime
    if status.get("host", socket.gethostname()) != socket.gethostname() and status.get("status") == "running":
        # The clock of that machine may differ, so wait for its next heartbeat.
        first_status = status
        until_s = time.time() + FRESH_S
        status = read()
        while status == first_status and time.time() < until_s:
            time.sleep(0.5)
            status = read()
        heartbeat_s = time.time() if status != first_status else min(heartbeat_s, path.stat().st_mtime, time.time())
    while True:
        curves.read()
        points = {name: thin(curve) for name, curve in curves.by_name.items()}
        yield Snapshot.take(folder, status, heartbeat_s, curves=points, other_runs=other_runs(top, folder))
        with suppress(OSError, UserError):  # the last status that could be read is shown again
            new_status = read()
            if new_status != status:
                # Not the time in the file, because the machine that writes to a shared folder may have another clock.
                heartbeat_s = time.time()
                status = new_status


def find_runs(top: Path) -> list[Path]:
    """Return the folders that have a status.json: first `top` if it has one, then those below it, newest first."""
    renewed_at = {}
    for pattern in (STATUS, f"*/{STATUS}", f"*/*/{STATUS}"):
        for path in top.glob(pattern):
            with suppress(OSError):  # the user has removed it meanwhile
                renewed_at[path.parent] = path.stat().st_mtime
    if not renewed_at:
        raise UserError(f"{top}: no run; found no {STATUS} there or below. Try the --checkpoint_dir of a run.")
    return sorted(renewed_at, key=lambda folder: (folder == top, renewed_at[folder]), reverse=True)


def other_runs(top: Path, folder: Path) -> dict[str, Snapshot]:
    """Return snapshots of the runs in `top` and below, by their path from there, without the one in `folder`."""
    snapshots = {}
    for run_folder in find_runs(top):
        if run_folder != folder:
            with suppress(OSError):
                renewed_at_s = (run_folder / STATUS).stat().st_mtime
                snapshot = Snapshot.take(run_folder, read_status(run_folder), renewed_at_s)
                snapshots[str(run_folder.relative_to(top))] = snapshot
    return snapshots


def process_state(folder: Path, pid: int | None, heartbeat_s: float) -> str:
    """Return the state of the process that trains in a folder: exists, suspended, gone, or hidden from this user.

    A process that is younger than the heartbeat is a different one. So is a process that has not opened the folder's
    lock, because a copy of a folder has the status of its original.
    """
    try:
        process = psutil.Process(pid or 0)
        state = process.status()
        if state == psutil.STATUS_ZOMBIE or process.create_time() > heartbeat_s + 3 or not has_lock(process, folder):
            return "gone"
    except psutil.AccessDenied:
        return "hidden"
    except psutil.NoSuchProcess:
        return "gone"
    return "suspended" if state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else "exists"


def has_lock(process: psutil.Process, folder: Path) -> bool:
    """Return whether a process has opened the lock of a folder, and the lock contains the number of the process."""
    lock = folder / ".lock"
    try:
        lock_stat = lock.lstat()
        number = lock.read_bytes().split()[:1]
        opened = [file.path for file in process.open_files()]
    except (OSError, UserError):
        return False
    if number != [b"%d" % process.pid] or stat.S_ISLNK(lock_stat.st_mode):
        return False
    for path in opened:
        with suppress(OSError):
            # A copy that is made of hard links has the same file under another name.
            is_other_name = lock_stat.st_nlink > 1 and os.path.realpath(path) != os.path.realpath(lock)
            if os.path.samestat(Path(path).stat(), lock_stat) and not is_other_name:
                return True
    return False


class Curves:
    """The losses in a metrics.jsonl, which is read as it grows; broken lines are skipped."""

    def __init__(self, path: Path):
        self.path = path
        self.reset(inode=0)

    def reset(self, inode: int) -> None:
        """Forget the curves, and read the file of an inode from its beginning."""
        self.inode = inode
        self.size = 0  # bytes that were read
        self.by_name: dict[str, Curve] = {"loss": [], "val_loss": []}

    def read(self) -> None:
        """Read what was written since the last call."""
        with suppress(FileNotFoundError, UserError), self.path.open("rb") as file:
            stat = os.fstat(file.fileno())
            if stat.st_ino != self.inode or stat.st_size < self.size:  # another run is in this folder now
                self.reset(stat.st_ino)
            file.seek(self.size)
            while line := file.readline(LONGEST_LINE):
                if not line.endswith(b"\n") and len(line) < LONGEST_LINE:  # not written completely yet
                    break
                self.size += len(line)
                match = POINT.match(line)
                if not match:
                    continue
                step = int(match[1])
                name = match[2].decode()
                if name == "first_step":  # from it on, the points of a launch replace those of earlier launches
                    for curve in self.by_name.values():
                        del curve[bisect_left(curve, (step, -math.inf)) :]
                    continue
                value = float(match[3])
                if math.isinf(value):  # written by another program: SteadyGPT writes no infinity
                    continue
                curve = self.by_name[name]
                curve.append((step, value))
                if len(curve) > 20 * MAX_POINTS:  # a log of months would fill the memory
                    curve[:] = thin(curve)


def thin(curve: Curve) -> Curve:
    """Return up to MAX_POINTS points: the lowest and the highest, such as a spike, of each of equal ranges of steps."""
    steps = [step for step, _ in curve]
    range_size = (max(steps, default=0) - min(steps, default=0) + 1) / (MAX_POINTS // 2)
    thinned: Curve = []
    for _, points in groupby(curve, lambda point: point[0] // range_size):
        by_value = sorted(points, key=itemgetter(1))
        thinned += sorted({by_value[0], by_value[-1]})
    return thinned


class State(NamedTuple):
    """The state of a run, the evidence for it, and a command to continue ("" if none)."""

    name: str  # running, suspended, hung, killed, stopped, finished or failed
    why: str
    command: str = ""


def state_of(snapshot: Snapshot) -> State:
    """Return the state of a run.

    A run that ends writes its state to status.json, unless it is killed. Before that, its state follows from its
    process, if that is on this machine, and from the age of the heartbeat.
    """
    status = snapshot.status
    process = snapshot.process
    age_s = snapshot.heartbeat_age_s
    age = duration_text(age_s)
    pid = status.get("pid")
    folder = shlex.quote(str(snapshot.folder))
    where = "" if folder == "checkpoints" else f" --checkpoint_dir {folder}"
    resume = f"./resume_training.sh{where}" if snapshot.saved_at is not None else ""
    name = status.get("status", "unknown")
    if name == "finished":
        return State(name, f"after {counted(status.get('step', 0), 'step')}", f"python generate.py latest{where}")
    if name != "running":
        return State(name, status.get("reason", ""), resume)
    if process == "suspended":
        return State(process, f"process {pid} is stopped by a signal; no heartbeat for {age}", f"kill -CONT {pid}")
    if process == "gone" and age_s > FRESH_S:  # otherwise it runs in a container, which has its own process numbers
        return State("killed", f"process {pid} no longer exists; last heartbeat {age} ago", resume)
    doing = status.get("doing", "starting")
    least_s = COMPILING_S if doing in ("starting", "evaluating") else SILENT_S
    if age_s <= max(least_s, SILENT_STEPS * status.get("step_ms", 0) / 1000):
        return State("running", f"{doing}; heartbeat {age} ago")
    why = f"no heartbeat for {age} from process {pid} on {status.get('host', 'this machine')}"
    return State("hung", why, f"kill -9 {pid}" if process == "exists" else "")
