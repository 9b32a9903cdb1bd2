"""Snapshots of the runs in a folder, from their files and locks, and the state of each run."""

import json
import math
import socket
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

from steadygpt.base.durable import lock_owner
from steadygpt.base.options import UserError
from steadygpt.base.text import command, counted, duration_text, run_flags
from steadygpt.base.typed import read_json
from steadygpt.log.metrics import METRICS, STATUS, Status, read_status

SILENT_S = 60.0  # a run without a heartbeat for this long, and for SILENT_STEPS steps, hangs
SILENT_STEPS = 5
COMPILING_S = 900.0  # in place of SILENT_S at the start and in evaluations: compiling the model renews no heartbeat
HEALTHY = ("running", "stopped", "finished")  # states

MAX_POINTS = 1000  # of a curve, more than a terminal has columns
Curve = list[tuple[int, float]]  # points (step, value) in the order of the steps


@dataclass
class Snapshot:
    """The state of a run at one moment, from its files and its lock."""

    folder: Path
    status: Status  # {} without a status.json, as in a mirror
    owner: str  # the process that has locked the folder, see lock_owner()
    heartbeat_age_s: float  # since status.json was renewed
    saved_at: float | None  # when the last save was written; None: there was none
    curves: dict[str, Curve] = field(default_factory=dict)  # loss and val_loss
    # Runs beside or below this one, without curves, by folder.
    other_runs: dict[str, "Snapshot"] = field(default_factory=dict)

    @classmethod
    def take(cls, folder: Path, status: Status, **fields: Any) -> "Snapshot":
        """Read the lock and latest.pt's date of a run; `fields` are the other fields of the snapshot."""
        latest = folder / "latest.pt"
        return cls(
            folder=folder,
            status=status,
            owner=lock_owner(folder),
            heartbeat_age_s=max(0.0, time.time() - status.get("updated_at", 0.0)),
            saved_at=latest.stat().st_mtime if latest.exists() else None,
            **fields,
        )


def watch(run_folder: str) -> Iterator[Snapshot]:
    """Yield snapshots of the run in a folder, or else of the newest run below it, each taken on demand."""
    top = Path(run_folder).expanduser()
    folder = find_runs(top)[0]
    curves = Curves(folder / METRICS)
    read = partial(read_json, folder / STATUS, Status, "a run that is alive writes this file again within seconds")
    status: Status = read() if (folder / STATUS).exists() else {}
    while True:
        curves.read()
        points = {name: thin(curve) for name, curve in curves.by_name.items()}
        yield Snapshot.take(folder, status, curves=points, other_runs=other_runs(top, folder))
        with suppress(OSError, UserError):  # the last status that could be read is shown again
            status = read()


def find_runs(top: Path) -> list[Path]:
    """Return the folders that have a log, a status or a process: `top` if it does, then those below, newest first."""
    changed_at: dict[Path, float] = {}
    for pattern in ("{}", "*/{}", "*/*/{}"):
        for name in (STATUS, METRICS):  # a mirror has no status.json
            for path in top.glob(pattern.format(name)):
                with suppress(OSError):  # the user has removed it
                    changed_at.setdefault(path.parent, path.stat().st_mtime)
        for path in top.glob(pattern.format(".lock")):  # a run that starts has no other file yet
            with suppress(OSError):
                if lock_owner(path.parent):
                    changed_at.setdefault(path.parent, path.stat().st_mtime)
    if not changed_at:
        raise UserError(
            f"{top}: no run; found no {STATUS} or {METRICS} there or below. Try the --checkpoint_dir of a run."
        )
    return sorted(changed_at, key=lambda folder: (folder == top, changed_at[folder]), reverse=True)


def other_runs(top: Path, folder: Path) -> dict[str, Snapshot]:
    """Return snapshots of the runs in `top` and below, by their relative path, except the one in `folder`."""
    snapshots = {}
    for run_folder in find_runs(top):
        if run_folder != folder:
            with suppress(OSError):
                snapshots[str(run_folder.relative_to(top))] = Snapshot.take(run_folder, read_status(run_folder))
    return snapshots


class Curves:
    """The losses in a metrics.jsonl, which is read as it grows; broken lines are skipped."""

    def __init__(self, path: Path):
        self.path = path
        self.size = 0  # bytes that were read
        self.by_name: dict[str, Curve] = {"loss": [], "val_loss": []}

    def read(self) -> None:
        """Read what was written since the last call."""
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            if self.path.stat().st_size < self.size:  # a new log has taken its place
                self.size = 0
                self.by_name = {name: [] for name in self.by_name}
            file.seek(self.size)
            for line in file:
                if not line.endswith(b"\n"):  # not written completely yet
                    break
                self.size += len(line)
                with suppress(ValueError, RecursionError, TypeError, KeyError, OverflowError):
                    self._add(json.loads(line))

    def _add(self, record: dict[str, Any]) -> None:
        step = int(record["step"])
        for name, curve in self.by_name.items():
            value = record.get(name)
            if "first_step" in record:  # from it on, the points of a launch replace those of earlier launches
                del curve[bisect_left(curve, (step, -math.inf)) :]
            elif value is not None and math.isfinite(value):
                curve.append((step, value))
            if len(curve) > 20 * MAX_POINTS:  # a log of months would fill the memory
                curve[:] = thin(curve)


def thin(curve: Curve) -> Curve:
    """Return up to MAX_POINTS points: the lowest and the highest (such as a spike) in equal ranges of steps."""
    steps = [step for step, _ in curve]
    range_size = (max(steps, default=0) - min(steps, default=0) + 1) / (MAX_POINTS // 2)
    thinned: Curve = []
    for _, points in groupby(curve, lambda point: point[0] // range_size):
        by_value = sorted(points, key=itemgetter(1))
        thinned += sorted({by_value[0], by_value[-1]})
    return thinned


class State(NamedTuple):
    """The state of a run, the evidence for it, and a command to continue ("" if none)."""

    name: str  # running, hung, killed, stopped, finished or failed; unknown without a status.json
    why: str
    command: str = ""


def state_of(snapshot: Snapshot) -> State:
    """Return the state of a run.

    A run that ends writes its state to status.json, unless it is killed. Before that, its state follows from the lock
    of its folder and the age of its heartbeat.
    """
    status = snapshot.status
    age_s = snapshot.heartbeat_age_s
    age = duration_text(age_s)
    pid = status.get("pid")
    host = status.get("host", socket.gethostname())
    is_here = host == socket.gethostname()
    where = run_flags(str(snapshot.folder))
    resume = ""
    if snapshot.saved_at is not None:
        resume = command("resume_training.sh") + run_flags(str(snapshot.folder), status.get("mirror", ""))
    name = status.get("status", "unknown")
    if snapshot.owner and snapshot.owner != f"{pid} on {host}":  # the status, if any, is from an earlier launch
        return State("running", f"process {snapshot.owner} has locked the folder and does not train yet")
    if name == "finished":
        return State(name, f"after {counted(status.get('step', 0), 'step')}", f"{command('generate.py')} latest{where}")
    if name != "running":
        return State(name, status.get("reason", f"no {STATUS}"), resume)
    if not snapshot.owner and is_here:  # from another machine, a lock may look free
        return State("killed", f"process {pid} no longer has the folder; last heartbeat {age} ago", resume)
    doing = status.get("doing", "starting")
    least_s = COMPILING_S if doing in ("starting", "evaluating") else SILENT_S
    if age_s <= max(least_s, SILENT_STEPS * status.get("step_ms", 0) / 1000):
        return State("running", f"{doing}; heartbeat {age} ago")
    return State("hung", f"no heartbeat for {age} from process {pid} on {host}", f"kill -9 {pid}" if is_here else "")
