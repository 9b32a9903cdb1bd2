"""Snapshots of a run, taken from its files and its process."""

import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import psutil

from steadygpt.monitor.chart import Curve

MAX_POINTS = 1000  # of a curve, more than a terminal has columns
MAX_WARNINGS = 5
TAIL_BYTES = 2**16  # of log.txt


@dataclass
class Snapshot:
    """What is known of a run at one moment."""

    folder: Path  # of the checkpoints
    status: dict[str, Any]  # the content of status.json
    process: str  # exists, suspended, gone, or elsewhere: on another machine
    heartbeat_age_s: float  # since status.json was renewed
    saved_age_s: float | None  # since the last save; None: there was none
    mirrored_age_s: float | None  # since the last upload
    disk_free_bytes: int  # on the disk of the checkpoints
    latest: dict[str, Any]  # the last value of each metric
    curves: dict[str, Curve]  # loss and val_loss
    warnings: list[str]  # the last ones in log.txt


def watch(run_folder: str) -> Iterator[Snapshot]:
    """Yield a snapshot of the run in a checkpoint folder whenever the next one is asked for.

    Raises: FileNotFoundError when the folder has no run.
    """
    folder = find_run(Path(run_folder).expanduser())
    path, saved = folder / "status.json", folder / "latest.pt"
    status: dict[str, Any] = {}
    metrics = Metrics(Path())
    while True:
        before, status = status, parsed(read_end(path)) or status
        if not before:
            heartbeat_s = unix_s(status.get("updated_at")) or path.stat().st_mtime
        elif status != before:
            # Not the date in the file: the writer of a shared folder may have a clock that differs.
            heartbeat_s = time.time()
        logdir = find_logs(folder, status)
        if metrics.path.parent != logdir:
            metrics = Metrics(logdir / "metrics.jsonl")
        metrics.read()
        is_here = status.get("host", socket.gethostname()) == socket.gethostname()
        yield Snapshot(
            folder=folder,
            status=status,
            process=process_state(status.get("pid"), heartbeat_s) if is_here else "elsewhere",
            heartbeat_age_s=max(0.0, time.time() - heartbeat_s),
            saved_age_s=age_s(saved.stat().st_mtime if saved.exists() else None),
            mirrored_age_s=age_s(unix_s(status.get("mirrored_at"))),
            disk_free_bytes=shutil.disk_usage(folder).free,
            latest=metrics.latest,
            curves=metrics.curves,
            warnings=last_warnings(logdir / "log.txt"),
        )


class Metrics:
    """The curves and the last value of each metric, from a metrics.jsonl that is read as it grows."""

    def __init__(self, path: Path):
        self.path, self.inode = path, -1
        self._restart()

    def _restart(self) -> None:
        self.size = 0  # of what was read
        self.latest: dict[str, Any] = {}
        self.curves: dict[str, Curve] = {"loss": [], "val_loss": []}

    def read(self) -> None:
        """Read what was written since the last call; everything if the file was replaced or cut back."""
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            stat = os.fstat(file.fileno())
            if stat.st_ino != self.inode or stat.st_size < self.size:
                self.inode = stat.st_ino
                self._restart()
            file.seek(self.size)
            for line in file:
                if line.endswith(b"\n"):
                    self.size += len(line)
                    self._add(parsed(line))

    def _add(self, record: dict[str, Any]) -> None:
        self.latest |= record
        for name, curve in self.curves.items():
            if record.get(name) is not None:  # null: it was not finite
                curve.append((record["step"], record[name]))
                if len(curve) > 2 * MAX_POINTS:
                    self.curves[name] = thin(curve)


def thin(curve: Curve) -> Curve:
    """Return at most MAX_POINTS of the points of a curve, in order, spikes among them.

    The steps are divided into equal ranges, of which the points with the lowest and the highest value stay.
    """
    first = curve[0][0]
    range_size = (curve[-1][0] - first + 1) / (MAX_POINTS // 2)
    kept: Curve = []
    for _, points in groupby(curve, lambda point: int((point[0] - first) / range_size)):
        by_value = sorted(points, key=itemgetter(1))
        kept += sorted({by_value[0], by_value[-1]})
    return kept


def last_warnings(log: Path) -> list[str]:
    """Return the warnings in the last lines of a log."""
    lines = read_end(log).decode("utf-8", "replace").splitlines()
    return [line.removeprefix("warning: ") for line in lines if line.startswith("warning: ")][-MAX_WARNINGS:]


# ---------------------------------------------------------------------------------------------------------------------
# where the files and the process are


def find_run(folder: Path) -> Path:
    """Return the folder if it has a status.json, or else its subfolder with the newest one.

    Raises: FileNotFoundError.
    """
    found = list(folder.glob("status.json")) or list(folder.glob("*/status.json"))
    if not found:
        raise FileNotFoundError(
            f"{folder}: no run; found no status.json there or in its subfolders. Try the --checkpoint_dir of a run."
        )
    return max(found, key=lambda path: path.stat().st_mtime).parent


def find_logs(folder: Path, status: dict) -> Path:
    """Return the folder of the run's logs: that of status.json, or one near the checkpoints if they were moved."""
    there = folder.resolve()
    named = Path(status.get("logdir") or folder)
    for logs in (named, there.parent / "logs", there.parent.parent / "logs" / there.name, folder):
        with suppress(OSError), open(logs / "log.txt", encoding="utf-8", errors="replace") as file:
            # A later run with the same --logdir has moved the logs of this one aside.
            if file.readline().removeprefix("run").strip() == status.get("run_name"):
                return logs
    return named


def process_state(pid: int | None, heartbeat_s: float) -> str:
    """Return exists, suspended or gone; a process that is younger than the heartbeat is a different one."""
    try:
        process = psutil.Process(pid or 0)
        state = process.status()
        is_gone = state == psutil.STATUS_ZOMBIE or process.create_time() > heartbeat_s + 3
    except psutil.NoSuchProcess:
        return "gone"
    if is_gone:
        return "gone"
    return "suspended" if state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else "exists"


def read_end(path: Path) -> bytes:
    """Return the last TAIL_BYTES of a file; none if it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read()
    except OSError:
        return b""


def parsed(text: bytes) -> dict[str, Any]:
    """Return a JSON object; an empty one if the text is none."""
    try:
        content = json.loads(text)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def unix_s(date: str | None) -> float | None:
    """Return a date of status.json in Unix seconds; None if it is missing."""
    return datetime.fromisoformat(date).timestamp() if date else None


def age_s(then_s: float | None) -> float | None:
    return None if then_s is None else max(0.0, time.time() - then_s)
