"""Snapshots of a run, taken from its files and its process, and whether it is alive."""

import math
import os
import re
import shlex
import shutil
import socket
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import psutil

from steadygpt.base.options import UserError
from steadygpt.base.text import counted, duration_text
from steadygpt.base.typed import parse_json, read_json
from steadygpt.log.metrics import METRICS, STATUS, Record, Status, find_logs

FRESH_S = 15.0  # a run renews its heartbeat at least every 10 s
SILENT_S = 60.0  # without a heartbeat for this long, or SILENT_STEPS steps, a run hangs
SILENT_STEPS = 5
COMPILING_S = 900.0  # the limit at the start and in evaluations: no heartbeat while the model is compiled

MAX_POINTS = 1000  # of a curve, more than a terminal has columns
Curve = list[tuple[int, float]]  # points (step, value) in the order of the steps
BLOCK_BYTES = 2**16  # of metrics.jsonl, in memory at once
TAIL_BYTES = 2**18  # at its end, where the last values are
# A line of metrics.jsonl: its step, its training or validation loss if that is a number, and the step of a start.
LINE = re.compile(
    rb'\{"step": (\d{1,18}), (?:"time": [\d.]+, )?(?:"loss": (?:(NUMBER)|null)(?=[,}])|'
    rb'"val_loss": (?:(NUMBER)|null)(?=[,}])|"start": (\d{1,18}), |"(?!(?:(?:val_)?loss|start)": )).*\}\n'.replace(
        b"NUMBER", rb"\d{1,18}(?:\.\d+)?(?:e(?:-\d{1,3}|\+\d\d))?"
    )
)


@dataclass
class Snapshot:
    """What is known of a run at one moment."""

    folder: Path  # of the checkpoints
    status: Status
    process: str  # exists, suspended, gone, or elsewhere: on another machine
    heartbeat_age_s: float  # since status.json was renewed
    saved_age_s: float | None  # since the last save; None: there was none
    mirrored_age_s: float | None  # since the last upload
    disk_free_bytes: int  # on the disk of the checkpoints
    latest: dict[str, float]  # the last value of each metric in this start
    curves: dict[str, Curve]  # loss and val_loss
    unread: int = 0  # broken lines of metrics.jsonl


def watch(run_folder: str) -> Iterator[Snapshot]:
    """Yield a snapshot of the run in a checkpoint folder whenever the next one is asked for."""
    folder = find_run(Path(run_folder).expanduser())
    path, saved = folder / STATUS, folder / "latest.pt"
    read = partial(read_json, path, Status, "a run that is alive writes this file again within seconds")
    status: Status = read()
    heartbeat_s = status.get("updated_at") or path.stat().st_mtime
    metrics = Metrics(Path())
    while True:
        logdir = find_logs(status.get("logdirs", []), folder, status.get("run_id", "")) or folder
        if metrics.path.parent != logdir:  # also after the user has removed the run, and then started another one
            metrics = Metrics(logdir / METRICS)
        metrics.read()
        is_here = status.get("host", socket.gethostname()) == socket.gethostname()
        yield Snapshot(
            folder=folder,
            status=status,
            process=process_state(status.get("pid"), heartbeat_s) if is_here else "elsewhere",
            heartbeat_age_s=max(0.0, time.time() - heartbeat_s),
            saved_age_s=age_s(saved.stat().st_mtime if saved.exists() else None),
            mirrored_age_s=age_s(status.get("mirrored_at")),
            disk_free_bytes=shutil.disk_usage(folder).free,
            latest=metrics.latest,
            curves={name: thin(curve) for name, curve in metrics.curves.items()},
            unread=metrics.unread,
        )
        with suppress(OSError, UserError):  # otherwise the last good one is shown
            before, status = status, read()
            if status != before:
                # Not the date in the file: the writer of a shared folder may have a clock that differs.
                heartbeat_s = time.time()


class Metrics:
    """The curves and the last value of each metric, from a metrics.jsonl that is read as it grows."""

    def __init__(self, path: Path):
        self.path, self.size = path, 0  # in bytes, of what was read
        self.latest: dict[str, float] = {}
        self.curves: dict[str, Curve] = {"loss": [], "val_loss": []}
        self.unread = 0

    def read(self) -> None:
        """Read what was written since the last call."""
        with suppress(FileNotFoundError), open(self.path, "rb") as file:
            file.seek(self.size)
            tail = os.fstat(file.fileno()).st_size - TAIL_BYTES
            while block := file.read(BLOCK_BYTES) + file.readline():
                block = block[: block.rfind(b"\n") + 1]  # the last line may be incomplete
                self._add(block, max(0, tail - self.size))
                self.size += len(block)

    def _add(self, lines: bytes, tail: int) -> None:
        """Add the losses of all lines, and the other values of those from the byte `tail` on."""
        found = LINE.findall(lines)
        self.unread += lines.count(b"\n") - len(found)
        starts = [number for number, line in enumerate(found) if line[3]]
        for begin, end in pairwise([0, *starts, len(found)]):
            segment = found[begin:end]
            if segment and (start := segment[0][3]):  # later starts win from their first step on
                for curve in self.curves.values():
                    del curve[bisect_left(curve, (int(start), -math.inf)) :]
            self.curves["loss"] += [(int(step), float(loss)) for step, loss, _, _ in segment if loss]
            self.curves["val_loss"] += [(int(step), float(loss)) for step, _, loss, _ in segment if loss]
        for name, curve in self.curves.items():
            if len(curve) > 20 * MAX_POINTS:
                self.curves[name] = thin(curve)
        for line in LINE.finditer(lines, tail):
            if line[4]:
                self.latest = {}  # status.json has the last scores
                continue
            try:
                record = parse_json(line[0], Record, "", "")
                self.latest |= {name: math.nan if value is None else value for name, value in record.items()}
                self.latest["step"] = int(line[1])  # a broken line may name it twice
            except UserError:
                self.unread += 1


def thin(curve: Curve) -> Curve:
    """Return a curve of up to twice MAX_POINTS as it is, otherwise MAX_POINTS of its points, spikes among them.

    The steps are divided into equal ranges, of which the points with the lowest and the highest value stay.
    """
    if len(curve) <= 2 * MAX_POINTS:
        return curve
    first = curve[0][0]
    range_size = (curve[-1][0] - first + 1) / (MAX_POINTS // 2)
    kept: Curve = []
    for _, points in groupby(curve, lambda point: (point[0] - first) // range_size):
        by_value = sorted(points, key=itemgetter(1))
        kept += sorted({by_value[0], by_value[-1]})
    return kept


# ---------------------------------------------------------------------------------------------------------------------
# where the files and the process are


def find_run(folder: Path) -> Path:
    """Return the folder if it has a status.json, or else its subfolder with the newest one."""
    found = list(folder.glob(STATUS)) or list(folder.glob(f"*/{STATUS}"))
    if not found:
        raise UserError(
            f"{folder}: no run; found no {STATUS} there or in its subfolders. Try the --checkpoint_dir of a run."
        )
    return max(found, key=lambda path: path.stat().st_mtime).parent


def process_state(pid: int | None, heartbeat_s: float) -> str:
    """Return exists, suspended or gone; a process that is younger than the heartbeat is a different one."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid or 0)
        state = process.status()
        if state != psutil.STATUS_ZOMBIE and process.create_time() <= heartbeat_s + 3:
            return "suspended" if state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else "exists"
    return "gone"


def age_s(then_s: float | None) -> float | None:
    return None if then_s is None else max(0.0, time.time() - then_s)


# ---------------------------------------------------------------------------------------------------------------------
# whether the run is alive


class State(NamedTuple):
    """The state of a run, the evidence for it, and a command to continue ("" if none)."""

    name: str  # running, starting, suspended, hung, silent, killed, stopped, finished or failed
    why: str
    command: str = ""

    @property
    def is_alive(self) -> bool:
        return self.name in ("running", "starting")

    @property
    def is_well(self) -> bool:
        return self.is_alive or self.name in ("stopped", "finished")


def state_of(snapshot: Snapshot) -> State:
    """Return the state of a run.

    A run says itself how it ended, unless it was killed. Otherwise its process decides, if it is on this machine, and
    the age of the heartbeat.
    """
    status, process, age_s = snapshot.status, snapshot.process, snapshot.heartbeat_age_s
    age, pid = duration_text(age_s), status.get("pid")
    folder = shlex.quote(str(snapshot.folder))
    where = "" if folder == "checkpoints" else f" --checkpoint_dir {folder}"
    resume = f"./resume_training.sh{where}" if snapshot.saved_age_s is not None else ""
    if (name := status.get("status", "unknown")) == "finished":
        return State(name, f"after {counted(status.get('step', 0), 'step')}", f"python generate.py latest{where}")
    if name != "running":
        return State(name, status.get("reason", ""), resume)

    doing = status.get("doing", "starting")
    least_s = COMPILING_S if doing in ("starting", "evaluating") else SILENT_S
    limit_s = max(least_s, SILENT_STEPS * status.get("step_ms", 0) / 1000)
    if process == "suspended":
        return State("suspended", f"process {pid} is stopped by a signal; no heartbeat for {age}", f"kill -CONT {pid}")
    if process == "gone" and age_s > FRESH_S:  # else it runs in a container, which has process numbers of its own
        return State("killed", f"process {pid} no longer exists; last heartbeat {age} ago", resume)
    if age_s <= limit_s:
        if doing == "starting":
            return State(
                "starting", f"loading data or compiling the model, which may take minutes; heartbeat {age} ago"
            )
        return State("running", f"{doing}; heartbeat {age} ago")
    if process == "elsewhere":
        return State(
            "silent", f"no heartbeat for {age}: hung or killed on {status['host']}, which this machine cannot see"
        )
    return State("hung", f"process {pid} exists, but sent no heartbeat for {age}", f"kill -9 {pid}")
